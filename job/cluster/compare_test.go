package cluster

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// nodes returns the facts of ranks without a fault: perNode ranks on each of n nodes.
func nodes(n, perNode int) []Facts {
	var all []Facts
	for node := range n {
		for local := range perNode {
			all = append(all,
				Facts{Host: fmt.Sprintf("n%d", node+1), LocalRank: local, Version: "v1", Program: "sha256 aa",
					Plugin: "none", JobFile: "sha256 bb", Kind: "cpu", Device: "EPYC", Kernels: "avx2", Rate: 1e12,
					Free: 64 << 30, Variables: map[string]string{"UCX_TLS": "rc"}, Interfaces: []string{"lo", "eth0"}})
		}
	}
	return all
}

func TestNothingIsWrong(t *testing.T) {
	for _, all := range [][]Facts{nodes(1, 1), nodes(2, 4), nodes(64, 8)} {
		if found := append(compare(all), speeds(all)...); len(found) > 0 {
			t.Errorf("%d ranks: %v", len(all), found)
		}
	}
}

// Every difference is found once, with rank, host, value and fix.
func TestCompare(t *testing.T) {
	for _, c := range []struct {
		what  string
		spoil func(all []Facts)
		code  status.Code
		want  []string
	}{
		{"program", func(all []Facts) { all[3].Program = "sha256 cc" }, status.InvalidArgument,
			[]string{"rank 3 on n2: v1, sha256 cc", "ranks 0, 1 on n1 and 2 on n2: v1, sha256 aa",
				"install the same file"}},
		{"program", func(all []Facts) { all[0].Version = "v0" }, status.InvalidArgument,
			[]string{"rank 0 on n1: v0, sha256 aa"}},
		{"CUDA plug-in", func(all []Facts) { all[1].Plugin = "cannot be used: ABI 3" }, status.InvalidArgument,
			[]string{"rank 1 on n1: cannot be used: ABI 3", "ULYSSES_CUDA_PLUGIN"}},
		{"job file", func(all []Facts) { all[2].JobFile, all[3].JobFile = "sha256 dd", "sha256 dd" },
			status.InvalidConfig,
			[]string{"ranks 2, 3 on n2: sha256 dd; ranks 0, 1 on n1: sha256 bb", "copy the file of rank 0"}},
		{"kernels", func(all []Facts) { all[2].Kernels = "avx512" }, status.InvalidConfig,
			[]string{"rank 2 on n2: avx512", "ULYSSES_ISA"}},
		{"device", func(all []Facts) { all[2].Kind = "cuda" }, status.InvalidConfig,
			[]string{"rank 2 on n2: cuda", "device.backend"}},
		{"environment", func(all []Facts) { all[3].Variables = map[string]string{"UCX_TLS": "tcp"} },
			status.InvalidArgument,
			[]string{"rank 3 on n2: UCX_TLS=tcp; ranks 0, 1 on n1 and 2 on n2: UCX_TLS=rc", "mpirun -x UCX_TLS"}},
		{"environment", func(all []Facts) { all[3].Variables = nil }, status.InvalidArgument,
			[]string{"rank 3 on n2: UCX_TLS is not set"}},
		{"host memory", func(all []Facts) { all[2].Free, all[3].Free = 10<<30, 10<<30 }, status.OutOfMemory,
			[]string{"rank 2 on n2 has 10.0 GiB free, the median of the nodes is 37.0 GiB", "leave this node out"}},
		{"slow device", func(all []Facts) { all[1].Rate = 0.7e12 }, status.Device,
			[]string{"rank 1 on n1: EPYC multiplies matrices with 700 GFLOP/s, the median is 1 TFLOP/s", "--cpu-bind"}},
		{"slow device", func(all []Facts) {
			for r := range all {
				all[r].Kind = "cuda"
			}
			all[3].Rate = 0.5e12
		}, status.Device, []string{"rank 3 on n2", "nvidia-smi"}},
		{"data.path", func(all []Facts) {
			all[3].Faults = []Fault{{"data.path", "data.path: a.txt: no such file", status.IO}}
		}, status.IO, []string{"rank 3 on n2: a.txt: no such file"}},
		{"data.path", func(all []Facts) {
			for r := range all {
				all[r].Faults = []Fault{{"data.path", "data.path: a.txt: no such file", status.IO}}
			}
		}, status.IO, []string{"ranks 0, 1 on n1 and 2, 3 on n2: a.txt: no such file"}},
	} {
		all := nodes(2, 2)
		c.spoil(all)
		found := append(compare(all), speeds(all)...)
		if len(found) != 1 || found[0].What != c.what || found[0].Code != c.code {
			t.Errorf("%s: %v", c.what, found)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(found[0].Text, w) {
				t.Errorf("%s: no %q in %s", c.what, w, found[0].Text)
			}
		}
		r := Report{Ranks: all, Findings: found}
		var out strings.Builder
		if err := r.Print(&out); err != nil || r.Code() != c.code ||
			!strings.Contains(out.String(), "4 ranks on 2 nodes: 1 finding\n") {
			t.Errorf("%s: code %v, %v\n%s", c.what, r.Code(), err, out.String())
		}
	}
}

// Ranks of a node may have network devices of their own, if the other nodes have the same ones.
func TestDevicesByLocalRank(t *testing.T) {
	all := nodes(2, 2)
	for r := range all {
		all[r].Variables = map[string]string{"UCX_NET_DEVICES": fmt.Sprintf("mlx5_%d:1", all[r].LocalRank)}
	}
	if found := compare(all); len(found) > 0 {
		t.Error(found)
	}
	all[3].Variables = map[string]string{"UCX_NET_DEVICES": "mlx5_7:1"}
	if found := compare(all); len(found) == 0 {
		t.Error("nothing was found")
	}
	all = nodes(1, 2)
	all[1].Variables = map[string]string{"UCX_TLS": "rc", "UCX_NET_DEVICES": "mlx5_1:1"}
	if found := compare(all); len(found) != 1 {
		t.Errorf("one node, two devices: %v", found)
	}
}

func TestNameIsShort(t *testing.T) {
	var ranks []int
	for r := range 20 {
		ranks = append(ranks, r)
	}
	if got := name(nodes(5, 4), ranks); got != "ranks 0, 1, 2, 3 on n1 and 4, 5, 6, 7 on n2 and 12 more" {
		t.Error(got)
	}
	if got := span([]int{0, 1, 2, 5, 7, 8}); got != "0-2,5,7-8" {
		t.Error(got)
	}
}

func TestVariables(t *testing.T) {
	got := Variables([]string{"UCX_TLS=rc", "NCCL_DEBUG=INFO=2", "OMPI_MCA_pml=ucx", "OMPI_MCA_ess_base_vpid=1",
		"OMPI_MCA_orte_launch=1", "OMPI_COMM_WORLD_RANK=3", "ULYSSES_ISA=avx2", "ULYSSES_SECRET=x", "HOME=/root"})
	if want := map[string]string{"UCX_TLS": "rc", "NCCL_DEBUG": "INFO=2", "OMPI_MCA_pml": "ucx",
		"ULYSSES_ISA": "avx2"}; !maps.Equal(got, want) {
		t.Error(got)
	}
}

// Interfaces that no other node can reach are named, unless Open MPI has been told which to use.
func TestInterfaceAdvice(t *testing.T) {
	all := nodes(2, 2)
	for _, r := range []int{2, 3} {
		all[r].Interfaces = []string{"lo", "eth0", "docker0", "virbr0"}
	}
	found := compare(all)
	if len(found) != 1 || found[0].Code != status.OK ||
		!strings.Contains(found[0].Text, "rank 2 on n2: no other node can reach docker0, virbr0; Open MPI") ||
		!strings.Contains(found[0].Text, "OMPI_MCA_btl_tcp_if_include") {
		t.Fatal(found)
	}
	r := Report{Ranks: all, Findings: found}
	var out strings.Builder
	if err := r.Print(&out); err != nil || r.Code() != status.OK ||
		!strings.Contains(out.String(), "\nadvice: network: rank 2 on n2") ||
		!strings.Contains(out.String(), "nothing is wrong") {
		t.Errorf("%v %v\n%s", r.Code(), err, out.String())
	}
	if found := compare(all[2:]); len(found) > 0 {
		t.Errorf("one node: %v", found)
	}
	for _, name := range []string{"OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"} {
		for r := range all {
			all[r].Variables = map[string]string{name: "eth0"}
		}
		if found := compare(all); len(found) > 0 {
			t.Errorf("%s: %v", name, found)
		}
	}
}
