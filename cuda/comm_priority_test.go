package cuda

import (
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// streamOf returns the communication stream of a communicator.
func streamOf(c comm.Comm) *commStream {
	switch k := c.(*Comm).transport.(type) {
	case *ipc:
		return k.commStream
	case *staged:
		return k.commStream
	case *nccl:
		return k.commStream
	}
	return nil
}

// axes are the communicators of a mesh whose sequence axis has all ranks.
func axes(r *gpuRank) (seq, data comm.Comm, err error) {
	if seq, err = comm.SplitPriority(r.c, 0, r.c.Rank()); err != nil {
		return nil, nil, err
	}
	data, err = r.c.Split(r.c.Rank(), 0)
	return seq, data, err
}

// Only the sequence axis has a stream of its own. With NCCL it has one only if NCCL starts kernels
// in the order of the calls; otherwise two streams could deadlock. The stream has its own scratch,
// and is closed with its last communicator.
func TestPriorityStream(t *testing.T) {
	fake := func(d *Device, host comm.Comm) (*Comm, error) {
		return newComm(host, func(h comm.Comm, use streamUse) (transport, error) { return newFakeNCCL(d, h, use) },
			forComm)
	}
	for _, c := range []struct {
		name    string
		make    func(*Device, comm.Comm) (*Comm, error)
		ordered string // NCCL_LAUNCH_ORDER_IMPLICIT
		own     bool
	}{{"ipc", ofKind("ipc"), "", true}, {"staged", ofKind("staged"), "", true}, {"nccl", fake, "", false},
		{"nccl, 0", fake, "0", false}, {"nccl, 1", fake, "1", true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("NCCL_LAUNCH_ORDER_IMPLICIT", c.ordered)
			onGPUs(t, 2, c.make, func(r *gpuRank) error {
				seq, data, err := axes(r)
				if err != nil {
					return err
				}
				world, s := streamOf(r.c), streamOf(seq)
				if own := s.s != world.s; own != c.own || streamOf(data).s != world.s {
					return status.Errorf(status.Internal,
						"the sequence axis has its own stream: %v, want %v; the data axis: %v", own, c.own,
						streamOf(data).s != world.s)
				}
				if x := s.shared.scratch; c.own && x != nil &&
					(x == world.shared.scratch || x.Bytes() >= world.shared.scratch.Bytes()) {
					return status.Errorf(status.Internal, "the scratch of the sequence axis has %d bytes", x.Bytes())
				}
				for _, x := range []comm.Comm{seq, data} {
					if err := x.Close(); err != nil {
						return err
					}
				}
				if closed := s.s.s == nil; closed != c.own {
					return status.Errorf(status.Internal, "after the last communicator, the stream is closed: %v",
						closed)
				}
				return nil
			})
		})
	}
}

// An all-to-all of the sequence axis that is enqueued after a gather of another axis completes
// while the gather waits for computations. On one stream it would always complete last. The
// emulated device runs streams in random order, so not every round has a pass; a GPU promises none.
func TestAllToAllPassesAGather(t *testing.T) {
	const ranks, rounds, rows = 2, 40, 300
	for _, priority := range []bool{true, false} {
		passed := make([]int, ranks)
		onGPUs(t, ranks, ofKind("ipc"), func(r *gpuRank) error {
			me, counts := r.c.Rank(), []int64{rows, rows}
			split := r.c.Split
			if priority {
				split = r.c.SplitPriority
			}
			seq, err := split(0, me)
			if err != nil {
				return err
			}
			var x [4]tensor.Tensor
			for i := range x {
				if x[i], err = r.tensor(tensor.F32, ranks*rows); err != nil {
					return err
				}
			}
			own, whole, send, received := x[0].Slice(0, 0, rows), x[1], x[2], x[3]
			for round := range rounds {
				value := float64(10*round + me)
				for k := range 10 { // the computation before the gather
					if err := r.d.Fill(r.s[0], own, value-float64(9-k)); err != nil {
						return err
					}
				}
				if err := r.d.Fill(r.s[1], send, value); err != nil {
					return err
				}
				if err := r.c.AllGather(r.s[0], whole, own, counts); err != nil {
					return err
				}
				if err := seq.AllToAll(r.s[1], received, send, counts, counts); err != nil {
					return err
				}
				got, err := r.values(r.s[1], received)
				if err != nil {
					return err
				}
				done, err := r.s[0].(*stream).isComplete()
				if err != nil {
					return err
				}
				if !done {
					passed[me]++
				}
				gathered, err := r.values(r.s[0], whole)
				if err != nil {
					return err
				}
				want := make([]float32, ranks*rows)
				for i := range want {
					want[i] = float32(10*round + i/rows)
				}
				if !slices.Equal(got, want) || !slices.Equal(gathered, want) {
					return status.Errorf(status.Internal, "round %d: received %v ..., gathered %v ..., want %v ...",
						round, got[rows-1:rows+1], gathered[rows-1:rows+1], want[rows-1:rows+1])
				}
			}
			return seq.Close()
		})
		n := passed[0] + passed[1]
		if priority && n == 0 && cudatest.Emulated() || !priority && n > 0 {
			t.Errorf("priority %v: %v of %d all-to-alls pass the gather on the two ranks", priority, passed, rounds)
		}
	}
}
