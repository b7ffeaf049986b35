package proc

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Cores returns the cores on which this process may run, as Linux lists them: "0-3,8-11"; "" =
// unknown.
func Cores() string { return line("/proc/self/status", "Cpus_allowed_list:") }

// line returns the rest of the line of a file that starts with a name, without spaces around it.
func line(path, name string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	for _, l := range strings.Split(string(text), "\n") {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(l), name); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// CoreList returns the numbers of a list such as "0-3,8-11". What is not a list gives nil.
func CoreList(list string) (cores []int) {
	for _, entry := range strings.Split(strings.TrimSpace(list), ",") {
		first, last, ranged := strings.Cut(entry, "-")
		a, err := strconv.Atoi(first)
		b := a
		if ranged && err == nil {
			b, err = strconv.Atoi(last)
		}
		if err != nil || a < 0 || b < a || b > 1<<16 {
			return nil
		}
		for c := a; c <= b; c++ {
			cores = append(cores, c)
		}
	}
	return cores
}

// GPUNode returns the NUMA node of a GPU and the list of the node's cores. It finds the GPU by its
// UUID in the files of NVIDIA's driver. cores is "" if they are unknown, for example because the
// machine has one node. root is "/", or another folder for tests.
func GPUNode(root, uuid string) (node int, cores string) {
	infos, _ := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/gpus/*/information"))
	for _, info := range infos {
		if uuid == "" ||
			!strings.EqualFold(strings.TrimPrefix(line(info, "GPU UUID:"), "GPU-"), strings.TrimPrefix(uuid, "GPU-")) {
			continue
		}
		address := filepath.Base(filepath.Dir(info))
		text, err := os.ReadFile(filepath.Join(root, "sys/bus/pci/devices", address, "numa_node"))
		if err != nil {
			break
		}
		if node, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil || node < 0 {
			break
		}
		text, err = os.ReadFile(filepath.Join(root, "sys/devices/system/node", "node"+strconv.Itoa(node), "cpulist"))
		if err != nil {
			break
		}
		return node, strings.TrimSpace(string(text))
	}
	return 0, ""
}
