package job

import (
	"fmt"
	"text/tabwriter"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/job/operator"
	"ulysses/job/plan"
	"ulysses/tensor"
)

// computeOperator runs an operator job.
func computeOperator(e *Env) (*operator.Report, error) {
	e.alone = false // all ranks return the same error
	r, err := operator.Open(e.Job, e.Device, e.Mesh, e.Clock, e.Compute, e.Mesh.Seq.Rank() == 0)
	if err != nil {
		return nil, err
	}
	if warning := e.operatorRank().WarnIdleRanks(r); warning != "" {
		e.Log.Warn().Msg(warning)
	}
	_, output := e.Job.OperatorFiles()
	return r.Do(*output, e.freeHost, e.leave)
}

// operatorRank returns this rank of an operator job for the planner.
func (e *Env) operatorRank() *plan.Rank {
	parts := &assembly.Parts{Job: e.Job, Device: e.Device, Mesh: e.Mesh, Clock: e.Clock, Compute: e.Compute,
		FreeHost: e.freeHost, PerNode: e.perNode}
	return &plan.Rank{Parts: parts, LocalRank: e.local}
}

// runOperator runs an operator job and prints its report, with the bytes of the all-to-alls beside
// the formula. If results are NaN or Inf, it writes the output and returns an error.
func runOperator(e *Env) error {
	if err := e.refuseUsedFile(); err != nil {
		return err
	}
	e.warn(nil, nil, 0)
	r, notFinite := computeOperator(e)
	if r == nil {
		return notFinite
	}
	_, output := e.Job.OperatorFiles()
	if notFinite != nil {
		notFinite = status.Errorf(status.Of(notFinite), "%w; %s has all results", notFinite, *output)
	}
	sums := []int64{r.Sent, r.Formula}
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
	if r.Levels != "" {
		fmt.Fprintf(w, "levels\t%s\n", r.Levels)
	}
	fmt.Fprintf(w, "seconds\t%.4f on rank 0, in %s, kernels %s\n", r.Seconds, file.DTypeName(e.Compute),
		e.Device.Info().Kernels)
	fmt.Fprintf(w, "memory\t%.1f MiB on rank 0\n", units.MiB(r.Bytes))
	fmt.Fprintf(w, "all-to-all\t%d bytes sent by all ranks, formula %d: %s\n", sums[0], sums[1], verdict)
	fmt.Fprintf(w, "output\t%s\n", *output)
	if err := w.Flush(); err != nil {
		return err
	}
	if e.quiet {
		fmt.Fprintln(e.Result, "output "+*output)
	}
	return notFinite
}
