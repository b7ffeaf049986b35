package job

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// places returns n nodes of perNode ranks with four cores for each rank, which is bound to them.
func places(n, perNode int, gpus bool) (all []place) {
	for h := range n {
		for r := range perNode {
			p := place{Host: fmt.Sprintf("n%d", h+1), Cores: fmt.Sprintf("%d-%d", 4*r, 4*r+3), Kind: "cpu"}
			if gpus {
				p.Kind, p.GPU = "cuda", fmt.Sprintf("GPU-%d%d", h, r)
			}
			all = append(all, p)
		}
	}
	return all
}

func TestWellPlaced(t *testing.T) {
	for _, gpus := range []bool{false, true} {
		all := places(2, 4, gpus)
		for _, perSequence := range []int{1, 2, 4, 8} {
			if texts := placementWarnings(all, perSequence, 4); len(texts) > 0 || kindFault(all) != nil {
				t.Errorf("%d ranks a sequence: %v", perSequence, texts)
			}
		}
	}
	// three ranks of a sequence do not fit four ranks of a node
	if texts := placementWarnings(places(3, 4, false), 3, 0); len(texts) > 0 {
		t.Error(texts)
	}
}

// Each bad placement has a warning with node, numbers and the launcher's option.
func TestPlacementWarnings(t *testing.T) {
	for name, c := range map[string]struct {
		all                  []place
		perSequence, threads int
		want                 string
	}{
		"uneven": {places(2, 4, false)[:6], 2, 0, "launch: n1 has 4 ranks and n2 has 2 ranks: two-level"},
		"shared": {func() []place {
			all := places(2, 4, true)
			all[6].GPU, all[7].GPU = all[4].GPU, all[5].GPU
			return all
		}(), 4, 0, "device: the 4 ranks on n2 share the memory and the speed of 2 GPUs; start one rank for each GPU (srun --ntasks-per-node=2), or give the node more (--gpus-per-node=4)"},
		"cyclic": {func() []place {
			all := places(2, 2, false)
			all[1].Host, all[2].Host = "n2", "n1"
			return all
		}(), 2, 0, "launch: ranks 0 to 1 share a sequence and are on n1, n2, but a node has room for them; start neighbouring ranks on one node (srun --distribution=block, mpirun --map-by core)"},
		"threads": {places(2, 4, false), 4, 6,
			"device.threads = 6: rank 0 on n1 may run on 4 cores (0-3); give each rank more (srun --cpus-per-task=6"},
		"far": {func() []place {
			all := places(1, 2, true)
			all[1].NUMA, all[1].Near = 1, "64-127"
			return all
		}(), 2, 0, "device: rank 1 on n1 runs on cores 4-7, and its GPU is on NUMA node 1, whose cores are 64-127; bind"},
	} {
		texts := placementWarnings(c.all, c.perSequence, c.threads)
		if len(texts) != 1 || !strings.HasPrefix(texts[0], c.want) {
			t.Errorf("%s: %q, want %q", name, texts, c.want)
		}
	}
}

// Ranks with and without a GPU are refused, and the error names both nodes with their numbers.
func TestNodeWithoutGPU(t *testing.T) {
	all := append(places(1, 2, true), places(2, 2, false)[2:]...)
	err := kindFault(all)
	want := "device.backend: rank 0 on n1 uses cuda (2 ranks there, 2 GPUs), rank 2 on n2 uses cpu (2 ranks there, 0 GPUs); give every node GPUs"
	if status.Of(err) != status.InvalidConfig || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// The ranks of other nodes do not share a rank's cores.
func TestThreadsOf(t *testing.T) {
	all := []place{{Host: "n1", Cores: "0-7"}, {Host: "n2", Cores: "0-7", CPUs: 6}, {Host: "n1", Cores: "0-7"},
		{Host: "n2", Cores: "4-7", CPUs: 6}}
	for rank, want := range []int{4, 3, 4, 2} {
		if got := threadsOf(all, rank, 2); got != want {
			t.Errorf("rank %d: %d threads, want %d", rank, got, want)
		}
	}
}

// If the launcher of a rank does not say how many ranks a node has, the ranks of a host are on one.
func TestOnNode(t *testing.T) {
	all := []place{{Host: "n1", OnNode: 2}, {Host: "n2", OnNode: 2}, {Host: "n1", Local: 1, OnNode: 2},
		{Host: "n2", Local: 1, OnNode: 2}}
	for _, known := range []bool{true, false} {
		for rank := range all {
			if local, size := onNode(all, rank); local != rank/2 || size != 2 {
				t.Errorf("known: %v: rank %d is %d of %d, want %d of 2", known, rank, local, size, rank/2)
			}
		}
		all[2].Local, all[2].OnNode = 0, 0
	}
}

// The cores near a GPU come from the files of the system.
func TestPlaceOfGPU(t *testing.T) {
	root := t.TempDir()
	for path, text := range map[string]string{
		"proc/driver/nvidia/gpus/0000:ca:00.0/information": "GPU UUID: \t GPU-b\n",
		"sys/bus/pci/devices/0000:ca:00.0/numa_node":       "1\n", "sys/devices/system/node/node1/cpulist": "4-7\n"} {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := place{Host: "n1", Cores: "0-3"}.withDevice("cuda", "GPU-b", root)
	if !far(p) || p.NUMA != 1 || p.Near != "4-7" {
		t.Errorf("%+v is near", p)
	}
	if p.Cores = "3-4"; far(p) {
		t.Errorf("%+v is far", p)
	}
}
