package proc

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// Cores returns the cores on which this process may run, as Linux lists them: "0-3,8-11"; "" =
// unknown.
func Cores() string { return line("/proc/self/status", "Cpus_allowed_list:") }

// ThreadCores returns the cores on which the calling thread may run.
func ThreadCores() string { return line("/proc/thread-self/status", "Cpus_allowed_list:") }

// Place is where a process runs: its host, and the cores on which it may run, in the form of Cores.
type Place struct{ Host, Cores string }

// Threads returns how many threads a process should have: its share of the cores on which it may
// run. all has the processes of a job, and own is its index there. A core that several processes of
// its host may use is divided among them, so a launcher that binds each process to its own cores
// gives it all of them. size is the number of all processes of the node. If all lacks some, this
// number divides cores that others share. It also divides unknown cores.
//
// Without binding, Slurm lets processes run on all cores of the node, also on those that other jobs
// have. The processes of a node therefore have at most cpus in all (CPULimit; 0 = unknown).
func Threads(all []Place, own, size int, cpus float64) int {
	mine := CoreList(all[own].Cores)
	users := map[int]int{} // processes by core
	known := 0
	for _, p := range all {
		if p.Host != all[own].Host {
			continue
		}
		known++
		for _, c := range CoreList(p.Cores) {
			users[c]++
		}
	}
	if size = max(size, known); len(mine) == 0 {
		return max(1, runtime.NumCPU()/size)
	}
	share := 0.0
	for _, c := range mine {
		share += 1 / float64(users[c])
	}
	if bound := known > 1 && share == float64(len(mine)); known < size && !bound {
		share = float64(len(mine)) / float64(size)
	}
	if cpus > 0 {
		share = min(share, cpus/float64(size))
	}
	return max(1, int(share+1e-6))
}

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
