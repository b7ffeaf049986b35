package job

import (
	"fmt"
	"text/tabwriter"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// runAttention is a job of kind "attention": one sequence group, its exchanges counted against the formula.
func runAttention(e *Env) error {
	if n := e.Mesh.Replicas; n > 1 {
		return e.Job.Errorf(status.InvalidConfig, "parallel.ulysses", "%d of %d ranks share the sequence and an attention job has one: set 0 for all of them",
			e.Mesh.Ulysses, e.Mesh.World.Size())
	}
	e.alone = false // RunAttention agrees on its own failures
	r, err := runAttentionThen(e.Device, e.Mesh.Seq, e.Clock, e.Compute, &e.Job.Attention, e.leave)
	if err != nil {
		return err
	}
	entry := e.Ledger.Get("sequence", comm.OpAllToAll)
	sums := []int64{entry.Bytes, r.SentForward + r.SentBackward}
	if err := e.world.AllReduce(nil, tensor.OfInt64(sums, 2), comm.Sum); err != nil {
		return err
	}
	verdict := "equal"
	if sums[0] != sums[1] {
		verdict = "NOT EQUAL"
	}
	w := tabwriter.NewWriter(e.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "input\t%s\n", r.Input)
	fmt.Fprintf(w, "plan\t%s\n", r.Plan)
	fmt.Fprintf(w, "seconds\t%.4f on rank 0, in %s, kernels %s\n", r.Seconds, dtypeName(e.Compute), e.Device.Info().Kernels)
	fmt.Fprintf(w, "memory\t%.1f MiB on rank 0\n", mib(r.Bytes))
	fmt.Fprintf(w, "all-to-alls\t%d bytes sent by all ranks, formula %d: %s\n", sums[0], sums[1], verdict)
	fmt.Fprintf(w, "output\t%s\n", e.Job.Attention.Output)
	return w.Flush()
}
