package proc

import (
	"os"
	"path/filepath"
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

// A GPU is found by its UUID, and its NUMA node by its address on the PCI bus.
func TestGPUNode(t *testing.T) {
	root := t.TempDir()
	for path, text := range map[string]string{
		"proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t\t H100\nIRQ:   \t\t 12\nGPU UUID: \t GPU-aaaa\n",
		"proc/driver/nvidia/gpus/0000:ca:00.0/information": "Model: \t\t H100\nGPU UUID: \t GPU-bbbb\n",
		"proc/driver/nvidia/gpus/0000:da:00.0/information": "GPU UUID: \t GPU-cccc\n",
		"sys/bus/pci/devices/0000:17:00.0/numa_node":       "0\n",
		"sys/bus/pci/devices/0000:ca:00.0/numa_node":       "1\n",
		"sys/bus/pci/devices/0000:da:00.0/numa_node":       "-1\n",
		"sys/devices/system/node/node0/cpulist":            "0-3\n",
		"sys/devices/system/node/node1/cpulist":            "4-7\n",
	} {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for uuid, want := range map[string]string{"GPU-aaaa": "0-3", "GPU-BBBB": "4-7", "GPU-cccc": "", "GPU-dddd": "",
		"": ""} {
		if node, cores := GPUNode(root, uuid); cores != want || uuid == "GPU-BBBB" && node != 1 {
			t.Errorf("%s: node %d, cores %q, want %q", uuid, node, cores, want)
		}
	}
}
