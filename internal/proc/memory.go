package proc

import (
	"math"
	"os"
	"path/filepath"
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

// FreeMemory returns the bytes of host memory that are available to all processes of the machine,
// or what the limits of this process's control groups leave if that is less; 0 = unknown.
func FreeMemory() int64 {
	free := Meminfo("MemAvailable:")
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
