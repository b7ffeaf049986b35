package backends

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// infosOf returns the infos of GPU ranks, each a process of its own: "a0" is GPU a of machine 0; a
// trailing ! means no NCCL.
func infosOf(ranks ...string) []rankInfo {
	var infos []rankInfo
	for i, r := range ranks {
		infos = append(infos,
			rankInfo{Kind: "cuda", Process: fmt.Sprint(i), GPU: "GPU-" + r[:1], Machine: "node" + r[1:2],
				NCCL: len(r) == 2, NoNCCL: "not found"})
	}
	return infos
}

// oneProcess makes the ranks threads of one process.
func oneProcess(infos []rankInfo) []rankInfo {
	for i := range infos {
		infos[i].Process = "one"
	}
	return infos
}

func TestChoose(t *testing.T) {
	cpus := []rankInfo{{Kind: "cpu"}, {Kind: "cpu"}}
	for _, c := range []struct {
		infos        []rankInfo
		policy, kind string
		text         string
	}{
		{cpus, "auto", "mpi", ""},
		{cpus, "mpi", "mpi", ""},
		{cpus, "local", "", `device.comm = "local": the ranks of this job use "mpi"`},
		{cpus, "nccl", "", `device.comm = "nccl" is not possible with device cpu; set device.comm = "auto"`},
		{infosOf("a0"), "auto", "ipc", "there is one rank"},
		{infosOf("a0", "b0"), "auto", "nccl", "each of 2 ranks has its own GPU"},
		// GPUs of two machines may have the same name
		{infosOf("a0", "a1"), "auto", "nccl", "each of 2"},
		{infosOf("a0", "b0", "a0"), "auto", "ipc", "nccl is not possible: ranks 0 and 2 share GPU-a"},
		{infosOf("a0", "b0!"), "auto", "ipc", "nccl is not possible: rank 1 has no NCCL (not found)"},
		{infosOf("a0", "b1", "b1"), "auto", "staged",
			"ipc is not possible: ranks 0 and 1 are on different machines (node0, node1)"},
		{oneProcess(infosOf("a0", "b0")), "auto", "ipc",
			"ipc: ranks 0 and 1 are threads of one process, in which nccl may hang"},
		{oneProcess(infosOf("a0", "b0!")), "auto", "ipc", "nccl is not possible: rank 1 has no NCCL"},
		{oneProcess(infosOf("a0", "b1")), "auto", "staged",
			"may hang while a rank allocates GPU memory; ipc is not possible: ranks 0 and 1"},
		{oneProcess(infosOf("a0", "b0")), "nccl", "nccl",
			`device.comm = "nccl"; warning: ranks 0 and 1 are threads of one process`},
		{infosOf("a0", "b0"), "ipc", "ipc", `device.comm = "ipc"`},
		{infosOf("a0", "b0"), "nccl", "nccl", `device.comm = "nccl"`},
		{infosOf("a0", "b0"), "mpi", "staged", `staged through host memory and mpi: device.comm = "mpi"`},
		{infosOf("a0", "b0"), "local", "",
			`device.comm = "local": the ranks of this job use "mpi"; set device.comm = "auto"`},
		{infosOf("a0", "b0", "a0"), "nccl", "",
			`device.comm = "nccl": ranks 0 and 2 share GPU-a; set device.comm to "ipc"`},
		{infosOf("a0", "b1"), "ipc", "", `device.comm = "ipc": ranks 0 and 1 are on different machines`},
		{infosOf("a0", "b0"), "pigeon", "", `device.comm = "pigeon" is unknown; use auto, nccl, ipc, mpi or local`},
		{append(infosOf("a0"), rankInfo{Kind: "cpu"}), "auto", "", "rank 0 uses device cuda, rank 1 uses cpu"},
		{append(infosOf("a0"), rankInfo{}), "auto", "", "rank 1 has no device"},
	} {
		kind, why, err := choose(c.infos, "mpi", "through host memory and mpi", c.policy)
		text := why
		if err != nil {
			text = err.Error()
		}
		if kind != c.kind || (err == nil) != (c.kind != "") || !strings.Contains(text, c.text) {
			t.Errorf("%s of %v: %q, %q, %v; want %q with %q", c.policy, c.infos, kind, why, err, c.kind, c.text)
		}
	}
	if _, _, err := choose(make([]rankInfo, 65), "mpi", "", "ipc"); err == nil {
		t.Error("ranks without devices got a communicator")
	}
	many := make([]string, 65)
	for i := range many {
		many[i] = "a0"
	}
	if _, _, err := choose(infosOf(many...), "mpi", "", "ipc"); status.Of(err) != status.Unsupported ||
		!strings.Contains(err.Error(), "65 ranks are more than the maximum of 64") {
		t.Errorf("65 ranks: %v", err)
	}
}

// aware is a communicator of an MPI library that accepts GPU memory.
type aware struct{ comm.Comm }

func (aware) TakesDeviceMemory() bool { return true }
func (aware) AllToAllDirect(dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	return nil, status.Errorf(status.Internal, "unexpected all-to-all")
}

// TestRoute checks that the text mentions host memory only if tensors are copied to it.
func TestRoute(t *testing.T) {
	c := comm.Local(1)[0]
	if got := route(c); got != "through host memory and local" {
		t.Error(got)
	}
	if got := route(aware{c}); got != "by local, which accepts GPU memory; sums through host memory" {
		t.Error(got)
	}
}

// TestOpenCommWithoutDevice checks that all ranks fail if one has no device, and none waits.
func TestOpenCommWithoutDevice(t *testing.T) {
	err := comm.RunLocal(3, func(c comm.Comm) error {
		d, _, err := Open(Choice{Backend: "cpu", Threads: 1})
		if err != nil {
			return err
		}
		defer d.Close()
		if c.Rank() == 1 {
			d = nil
		}
		if _, _, err := OpenComm(d, c, "auto"); status.Of(err) != status.Device {
			return status.Errorf(status.Internal, "rank %d: %v", c.Rank(), err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestOpenCommShares checks that ranks on one GPU divide its memory, and that one rank alone has
// all of it.
func TestOpenCommShares(t *testing.T) {
	cudatest.Use(t)
	if found, err := cuda.Probe(); err != nil || found.Count != 1 {
		t.Skip("SKIPPED: not one GPU", err)
	}
	err := comm.RunLocal(3, func(c comm.Comm) error {
		d, _, err := Open(Choice{Backend: "cuda", LocalRank: c.Rank()})
		if err != nil {
			return err
		}
		defer d.Close()
		for _, host := range []comm.Comm{c, comm.Local(1)[0]} {
			made, _, err := OpenComm(d, host, "auto")
			if err != nil {
				return err
			}
			info, whole := d.Info(), d.(*cuda.Device).Details().Whole
			if n := host.Size(); info.Sharing != n || info.Memory != whole/int64(n) {
				return status.Errorf(status.Internal, "%d ranks: Sharing = %d, Memory = %d of %d bytes", n,
					info.Sharing, info.Memory, whole)
			}
			if err := made.Close(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestShareFree checks that ranks on one GPU divide what another allocation leaves of its memory,
// and that all ranks have the same number.
func TestShareFree(t *testing.T) {
	cudatest.Use(t)
	if found, err := cuda.Probe(); err != nil || found.Count != 1 {
		t.Skip("SKIPPED: not one GPU", err)
	}
	const taken = 100 << 20
	other, err := cuda.Open(cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	before, err := other.FreeMemory()
	if err != nil {
		t.Fatal(err)
	}
	b, err := other.Alloc(taken)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	free := make([]int64, 3)
	err = comm.RunLocal(len(free), func(c comm.Comm) error {
		d, _, err := Open(Choice{Backend: "cuda", LocalRank: c.Rank()})
		if err != nil {
			return err
		}
		defer d.Close()
		host, err := c.Split(0, c.Rank())
		if err != nil {
			return err
		}
		made, _, err := OpenComm(d, host, "auto")
		if err != nil {
			return err
		}
		if err := ShareFree(c, d); err != nil {
			return err
		}
		free[c.Rank()] = d.Info().Free
		return made.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
	most := (before - taken) / 3
	if least := most - 100<<20; free[0] > most || free[0] < least || free[1] != free[0] || free[2] != free[0] {
		t.Errorf("free for each rank: %d; want equal numbers from %d to %d", free, least, most)
	}
}

// A variable that the user has set stays.
func TestOwnProcess(t *testing.T) {
	const order = "NCCL_LAUNCH_ORDER_IMPLICIT"
	t.Setenv(order, "0")
	if OwnProcess(); os.Getenv(order) != "0" {
		t.Errorf("%s = %q replaces the user's", order, os.Getenv(order))
	}
	os.Unsetenv(order)
	if OwnProcess(); os.Getenv(order) != "1" {
		t.Errorf("%s = %q", order, os.Getenv(order))
	}
}

// TestOpenCommWithoutPeerAccess checks that ranks of one process use host memory if their GPUs
// cannot access each other's memory, and that ipc is refused.
func TestOpenCommWithoutPeerAccess(t *testing.T) {
	cudatest.Use(t)
	if !cudatest.Emulated() {
		t.Skip("SKIPPED: needs two GPUs without peer access")
	}
	t.Setenv("ULYSSES_EMULATED_DEVICES", "2")
	t.Setenv("ULYSSES_EMULATED_PEERS", "0")
	sum := func(c comm.Comm, policy string) (kind, why string, err error) {
		d, _, err := Open(Choice{Backend: "cuda", LocalRank: c.Rank()})
		if err != nil {
			return "", "", err
		}
		defer d.Close()
		made, why, err := OpenComm(d, c, policy)
		if err != nil {
			return "", "", err
		}
		defer made.Close()
		b, err := d.Alloc(4)
		if err != nil {
			return "", "", err
		}
		defer b.Free()
		x := tensor.Of(b.Pointer(), tensor.F32, 1)
		x.Where = tensor.CUDA
		s, err := d.NewStream()
		if err != nil {
			return "", "", err
		}
		defer s.Close()
		if err := d.Fill(s, x, float64(1+c.Rank())); err != nil {
			return "", "", err
		}
		if err := made.AllReduce(s, x, comm.Sum); err != nil {
			return "", "", err
		}
		got := make([]float32, 1)
		if err := d.Copy(s, tensor.OfFloat32(got, 1), x); err != nil {
			return "", "", err
		}
		if err := s.Sync(); err != nil || got[0] != 3 {
			return "", "", status.Errorf(status.Internal, "%s: sum %v, %v; want 3", made.Kind(), got[0], err)
		}
		return made.Kind(), why, nil
	}
	// each rank has an error of its own
	want := []string{"rank 0 on GPU 0 cannot access the memory of rank 1 on GPU 1",
		"rank 1 on GPU 1 cannot access the memory of rank 0 on GPU 0"}
	if err := comm.RunLocal(2, func(c comm.Comm) error {
		if kind, why, err := sum(c, "auto"); err != nil || kind != "staged" || !strings.Contains(why, "GPU 1") {
			return status.Errorf(status.Internal, "auto: %s, %s, %v", kind, why, err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	err := comm.RunLocal(2, func(c comm.Comm) error {
		_, _, err := sum(c, "ipc")
		return err
	})
	if status.Of(err) != status.Unsupported ||
		!slices.ContainsFunc(want, func(w string) bool { return strings.Contains(err.Error(), w) }) {
		t.Errorf("ipc: %v; want one of %q", err, want)
	}
}
