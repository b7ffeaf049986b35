package proc

import (
	"runtime"
	"slices"
	"testing"
)

func TestCores(t *testing.T) {
	if runtime.GOOS == "linux" && len(CoreList(Cores())) != runtime.NumCPU() {
		t.Errorf("cores %q, NumCPU %d", Cores(), runtime.NumCPU())
	}
	for list, want := range map[string][]int{"3": {3}, "0-2,8-9\n": {0, 1, 2, 8, 9}, "": nil, "a": nil, "3-1": nil,
		"1-": nil, "0-99999999": nil} {
		if got := CoreList(list); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", list, got, want)
		}
	}
}

// A process has the cores that it is bound to; processes that share cores divide them.
func TestThreads(t *testing.T) {
	if Cores() != ThreadCores() {
		t.Errorf("the process has %q, its thread %q", Cores(), ThreadCores())
	}
	for _, x := range []struct {
		cores []string
		size  int
		cpus  float64
		want  int
	}{
		{[]string{"0-3", "4-7", "8-11"}, 3, 0, 4}, {[]string{"0-7"}, 1, 0, 8}, {[]string{"0-7", "0-7"}, 2, 0, 4},
		{[]string{"0-7", "0-7", "0-7"}, 3, 0, 2}, {[]string{"0", "0"}, 2, 0, 1}, {[]string{"0-3", "0-7"}, 2, 0, 2},
		{[]string{"0-7", "0-7"}, 0, 0, 4}, // a launcher that does not say how many processes the node has
		// two of four processes
		{[]string{"0-7", "8-15"}, 4, 0, 8}, {[]string{"0-7", "0-7"}, 4, 0, 2}, {[]string{"0-7"}, 4, 0, 2},
		// Slurm has given the processes of the node these CPUs
		{[]string{"0-63", "0-63"}, 2, 4, 2}, {[]string{"0-63", "0-63"}, 2, 1, 1}, {[]string{"0-63", "0-63"}, 2, 64, 32},
		{[]string{"0-7", "8-15"}, 2, 16, 8}, {[]string{"0-63"}, 4, 8, 2},
		{[]string{"0-63"}, 1, 2.5, 2}, {[]string{"0-63"}, 1, 0.5, 1}, // of a container
		// unknown cores
		{[]string{"", ""}, 2, 0, max(1, runtime.NumCPU()/2)}, {[]string{""}, 1, 0, runtime.NumCPU()},
	} {
		all := []Place{{"n1", x.cores[0]}, {"n2", "0-63"}} // the other host does not matter
		for _, cores := range x.cores[1:] {
			all = append(all, Place{"n1", cores})
		}
		if got := Threads(all, 0, x.size, x.cpus); got != x.want {
			t.Errorf("%q, %d processes, %v CPUs: %d threads, want %d", x.cores, x.size, x.cpus, got, x.want)
		}
	}
}

// A GPU is found by its UUID, and its NUMA node by its address on the PCI bus.
func TestGPUNode(t *testing.T) {
	root := folder(t, map[string]string{
		"proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t\t H100\nIRQ:   \t\t 12\nGPU UUID: \t GPU-aaaa\n",
		"proc/driver/nvidia/gpus/0000:ca:00.0/information": "Model: \t\t H100\nGPU UUID: \t GPU-bbbb\n",
		"proc/driver/nvidia/gpus/0000:da:00.0/information": "GPU UUID: \t GPU-cccc\n",
		"sys/bus/pci/devices/0000:17:00.0/numa_node":       "0\n",
		"sys/bus/pci/devices/0000:ca:00.0/numa_node":       "1\n",
		"sys/bus/pci/devices/0000:da:00.0/numa_node":       "-1\n",
		"sys/devices/system/node/node0/cpulist":            "0-3\n",
		"sys/devices/system/node/node1/cpulist":            "4-7\n",
	})
	for uuid, want := range map[string]string{"GPU-aaaa": "0-3", "GPU-BBBB": "4-7", "GPU-cccc": "", "GPU-dddd": "",
		"": ""} {
		if node, cores := GPUNode(root, uuid); cores != want || uuid == "GPU-BBBB" && node != 1 {
			t.Errorf("%s: node %d, cores %q, want %q", uuid, node, cores, want)
		}
	}
}
