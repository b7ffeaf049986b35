package plan

import (
	"fmt"
	"io"

	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/assembly"
	"ulysses/job/operator"
	"ulysses/model"
)

// predictOperator goes through an operator job, of which the file's header and lists of
// documents are read.
func (f *Forecast) predictOperator() error {
	k, err := operator.Open(f.Job, f.Device, f.Mesh, f.Clock, f.Compute, false)
	if err != nil {
		return err
	}
	defer k.Free()
	if err := k.Allocate(); err != nil {
		return err
	}
	r := k.Report()
	saved, workspace := k.Scratch()
	f.Memory = []model.Component{{Name: "tensors", Bytes: r.Bytes - saved - workspace}, {Name: "saved for the backward pass", Bytes: saved},
		{Name: "workspace", Bytes: workspace}}
	if all := f.Device.Info().Memory; all > 0 && r.Bytes > all {
		return status.Errorf(status.OutOfMemory, "plan: %s are planned for each rank, and its device has %s: use more ranks, so that each holds fewer rows and heads",
			units.Bytes(r.Bytes), units.Bytes(all))
	}
	if err := f.hostHolds(); err != nil {
		return err
	}
	before := f.so()
	f.Clock.Push(f.Job.Kind)
	defer f.Clock.Pop()
	if err := k.Compute(); err != nil {
		return err
	}
	f.took, f.Saved, f.tokens = f.so().plus(before, -1), r, k.Tokens()
	return nil
}

func (f *Forecast) printSaved(out io.Writer) error {
	fmt.Fprintf(out, "input            %s\nplan             %s\n\n", f.Saved.Input, f.Saved.Plan)
	return assembly.PrintComponents(out, f.Memory, f.Device.Info(), 0)
}
