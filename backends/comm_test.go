package backends

import (
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// infos of GPU ranks: "a0" is GPU a of machine 0; a trailing ! is a rank without NCCL.
func infosOf(ranks ...string) []rankInfo {
	var infos []rankInfo
	for _, r := range ranks {
		infos = append(infos, rankInfo{Kind: "cuda", GPU: "GPU-" + r[:1], Machine: "node" + r[1:2], NCCL: len(r) == 2, NoNCCL: "not found"})
	}
	return infos
}

func TestChoose(t *testing.T) {
	cpus := []rankInfo{{Kind: "cpu"}, {Kind: "cpu"}}
	for _, c := range []struct {
		infos        []rankInfo
		policy, kind string
		says         string
	}{
		{cpus, "auto", "mpi", ""},
		{cpus, "mpi", "mpi", ""},
		{cpus, "local", "", `device.comm = "local": these ranks were started as "mpi"`},
		{cpus, "nccl", "", `device.comm = "nccl" on device cpu: say "auto"`},
		{infosOf("a0"), "auto", "ipc", "one rank alone"},
		{infosOf("a0", "b0"), "auto", "nccl", "each of 2 ranks has a GPU of its own"},
		// names of GPUs may repeat on another machine
		{infosOf("a0", "a1"), "auto", "nccl", "each of 2"},
		{infosOf("a0", "b0", "a0"), "auto", "ipc", "for nccl ranks 0 and 2 share GPU-a"},
		{infosOf("a0", "b0!"), "auto", "ipc", "for nccl rank 1 has no NCCL (not found)"},
		{infosOf("a0", "b1", "b1"), "auto", "staged", "for ipc ranks 0 and 1 are on different machines (node0, node1)"},
		{infosOf("a0", "b0"), "ipc", "ipc", `device.comm = "ipc"`},
		{infosOf("a0", "b0"), "nccl", "nccl", `device.comm = "nccl"`},
		{infosOf("a0", "b0"), "mpi", "staged", `staged through host memory and mpi: device.comm = "mpi"`},
		{infosOf("a0", "b0", "a0"), "nccl", "", `device.comm = "nccl": ranks 0 and 2 share GPU-a: say "ipc"`},
		{infosOf("a0", "b1"), "ipc", "", `device.comm = "ipc": ranks 0 and 1 are on different machines`},
		{infosOf("a0", "b0"), "pigeon", "", `device.comm = "pigeon": auto, nccl, ipc, mpi or local`},
		{append(infosOf("a0"), rankInfo{Kind: "cpu"}), "auto", "", "rank 0 computes on device cuda, rank 1 on cpu"},
		{append(infosOf("a0"), rankInfo{}), "auto", "", "rank 1 has no device"},
	} {
		kind, why, err := choose(c.infos, "mpi", "through host memory and mpi", c.policy)
		text := why
		if err != nil {
			text = err.Error()
		}
		if kind != c.kind || (err == nil) != (c.kind != "") || !strings.Contains(text, c.says) {
			t.Errorf("%s of %v: %q, %q, %v; want %q with %q", c.policy, c.infos, kind, why, err, c.kind, c.says)
		}
	}
	if _, _, err := choose(make([]rankInfo, 65), "mpi", "", "ipc"); err == nil {
		t.Error("ranks without devices were served")
	}
	many := make([]string, 65)
	for i := range many {
		many[i] = "a0"
	}
	if _, _, err := choose(infosOf(many...), "mpi", "", "ipc"); status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), "65 ranks are more than the 64") {
		t.Errorf("65 ranks: %v", err)
	}
}

// aware is ranks whose MPI says that it takes memory of GPUs.
type aware struct{ comm.Comm }

func (aware) TakesDeviceMemory() bool { return true }
func (aware) AllToAllDirect(dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	return nil, status.Errorf(status.Internal, "nobody asked for an exchange")
}

// TestThrough: who reads the log is not told of host memory where there is none on the way.
func TestThrough(t *testing.T) {
	c := comm.Local(1)[0]
	if got := through(c); got != "through host memory and local" {
		t.Error(got)
	}
	if got := through(aware{c}); got != "by local, which says that it takes memory of GPUs; sums through host memory" {
		t.Error(got)
	}
}

// TestOpenCommWithoutDevice: a rank whose device did not open makes all fail, and none wait.
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

// TestOpenCommShares: ranks on one GPU may each have their part of its memory, and one that is
// alone on it again the whole.
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
				return status.Errorf(status.Internal, "%d ranks: %d share, and %d of %d bytes are for one", n, info.Sharing, info.Memory, whole)
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
