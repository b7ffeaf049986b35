package proc

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// MemoryLimit returns the smallest memory limit, in bytes, of this process's control group and of
// the groups that contain it, as Slurm, systemd and containers set it; 0 = none.
func MemoryLimit() int64 {
	limit, _ := groupMemory("/")
	return limit
}

// HostMemory returns the bytes of this machine's host memory, and those that are available to all
// its processes; 0 = unknown.
func HostMemory() (total, available int64) { return hostMemory("/") }

func hostMemory(root string) (total, available int64) {
	info := filepath.Join(root, "proc/meminfo")
	total, available = procBytes(info, "MemTotal:"), procBytes(info, "MemAvailable:")
	ofGPUs, free := gpuMemory(root)
	return max(0, total-ofGPUs), max(0, available-free)
}

// gpuMemory returns the bytes that /proc/meminfo counts as host memory and that are memory of GPUs.
// On Grace Hopper and Grace Blackwell NVIDIA's driver can add it to the system, as NUMA nodes
// without cores. A container may see only some of the GPUs, but it sees all nodes.
func gpuMemory(root string) (total, free int64) {
	status, _ := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/gpus/*/numa_status"))
	if !slices.ContainsFunc(status, func(path string) bool { return line(path, "Status:") == "online" }) {
		return 0, 0
	}
	lists, _ := filepath.Glob(filepath.Join(root, "sys/devices/system/node/node[0-9]*/cpulist"))
	for _, list := range lists {
		if cores, err := os.ReadFile(list); err != nil || strings.TrimSpace(string(cores)) != "" {
			continue
		}
		folder := filepath.Dir(list)
		info, node := filepath.Join(folder, "meminfo"), "Node "+strings.TrimPrefix(filepath.Base(folder), "node")
		total += procBytes(info, node+" MemTotal:")
		free += procBytes(info, node+" MemFree:")
	}
	return total, free
}

// FreeMemory returns the bytes of host memory that are available to all processes of the machine,
// or what the limits of this process's control groups leave if that is less; 0 = unknown.
func FreeMemory() int64 {
	_, free := HostMemory()
	if limit, left := groupMemory("/"); limit > 0 && left < free {
		return max(left, 1<<20) // 0 is unknown, also after a division by the ranks of a host
	}
	return free
}

// AddressLimit returns the limit of this process's address space in bytes; 0 = none.
func AddressLimit() int64 {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_AS, &limit) != nil || limit.Cur > math.MaxInt64 {
		return 0
	}
	return int64(limit.Cur)
}

// memoryFiles are the names of a control group's limit and use, and of the lines of memory.stat
// with the file pages that Linux can evict.
type memoryFiles struct {
	limit, use string
	evictable  [2]string
}

var (
	memoryV2 = memoryFiles{"memory.max", "memory.current", [2]string{"active_file", "inactive_file"}}
	memoryV1 = memoryFiles{"memory.limit_in_bytes", "memory.usage_in_bytes",
		[2]string{"total_active_file", "total_inactive_file"}}
)

// groupMemory returns the smallest limit of this process's control groups, and the smallest number
// of bytes that one of these limits leaves. The limit is 0 if there is none.
func groupMemory(root string) (limit, left int64) {
	left = math.MaxInt64
	eachGroup(root, "memory", func(folder string, v1 bool) {
		names := memoryV2
		if v1 {
			names = memoryV1
		}
		if n := number(filepath.Join(folder, names.limit)); n > 0 {
			limit = lower(limit, n)
			left = min(left, max(0, n-used(folder, names)))
		}
	})
	return limit, left
}

// used returns the bytes of a control group's use that Linux cannot evict.
func used(folder string, names memoryFiles) int64 {
	n := number(filepath.Join(folder, names.use))
	for _, name := range names.evictable {
		evictable, _ := strconv.ParseInt(line(filepath.Join(folder, "memory.stat"), name+" "), 10, 64)
		n -= evictable
	}
	return max(0, n)
}

// number returns the number in a file; 0 if there is none. Version 2 writes "max" for no limit,
// version 1 a number close to the largest int64.
func number(path string) int64 {
	text, _ := os.ReadFile(path)
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || n >= 1<<62 {
		return 0
	}
	return n
}
