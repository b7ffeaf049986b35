package job

import (
	"fmt"
	"text/tabwriter"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/tensor"
)

// savedJobs are the kinds of jobs on saved tensors.
var savedJobs = map[string]struct {
	input   func(j *file.Job) *string
	output  func(j *file.Job) *string
	subject func(j *file.Job) (*subject, error)
	open    func(e *Env, writer bool) (savedKind, error)
}{
	"attention": {func(j *file.Job) *string { return &j.Attention.Input }, func(j *file.Job) *string { return &j.Attention.Output }, attentionSubject, func(e *Env, writer bool) (savedKind, error) {
		return newAttentionRun(e.Device, e.Mesh.Seq, e.Clock, e.Compute, &e.Job.Attention, writer)
	}},
	"gdn": {func(j *file.Job) *string { return &j.GDN.Input }, func(j *file.Job) *string { return &j.GDN.Output }, gdnSubject, func(e *Env, writer bool) (savedKind, error) {
		return newGDNRun(e.Device, e.Mesh.Seq, e.Clock, e.Compute, &e.Job.GDN, writer)
	}},
}

// openSavedJob makes a job on saved tensors ready: one sequence group. Collective.
func openSavedJob(e *Env, writer bool) (savedKind, error) {
	if n := e.Mesh.Replicas; n > 1 {
		return nil, e.Job.Errorf(status.InvalidConfig, "parallel.ulysses", "%d of %d ranks share the sequence and a job of kind %q has one: set 0 for all of them",
			e.Mesh.Ulysses, e.Mesh.World.Size(), e.Job.Kind)
	}
	return savedJobs[e.Job.Kind].open(e, writer)
}

// computeSaved runs a job on saved tensors.
func computeSaved(e *Env) (*SavedReport, error) {
	e.alone = false // the run agrees on its own failures
	k, err := openSavedJob(e, e.Mesh.Seq.Rank() == 0)
	if err != nil {
		return nil, err
	}
	return runThen(k, *savedJobs[e.Job.Kind].output(e.Job), e.leave)
}

// runSaved says what was done, its exchanges counted against the formula. Results that are no
// finite numbers end the job once they are written: they show where to look.
func runSaved(e *Env) error {
	if err := e.refuseUsedFile(); err != nil {
		return err
	}
	e.warn(nil, nil, 0)
	r, unfinite := computeSaved(e)
	if r == nil {
		return unfinite
	}
	output := *savedJobs[e.Job.Kind].output(e.Job)
	if unfinite != nil {
		unfinite = status.Errorf(status.Of(unfinite), "%w; %s has all values, as they were computed", unfinite, output)
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
	fmt.Fprintf(w, "seconds\t%.4f on rank 0, in %s, kernels %s\n", r.Seconds, file.DTypeName(e.Compute), e.Device.Info().Kernels)
	fmt.Fprintf(w, "memory\t%.1f MiB on rank 0\n", units.MiB(r.Bytes))
	fmt.Fprintf(w, "exchanges\t%d bytes sent by all ranks, formula %d: %s\n", sums[0], sums[1], verdict)
	fmt.Fprintf(w, "output\t%s\n", output)
	if err := w.Flush(); err != nil {
		return err
	}
	if e.quiet {
		fmt.Fprintln(e.Result, "output "+output)
	}
	return unfinite
}
