package plan

import (
	"fmt"
	"io"

	"ulysses/job/assembly"
	"ulysses/job/operator"
	"ulysses/model"
)

// predictOperator dry-runs an operator job. It reads the header of the input and the lists of
// documents.
func (f *Forecast) predictOperator() error {
	k, err := operator.Open(f.Job, f.Device, f.Mesh, f.Clock, f.Compute, false)
	if err != nil {
		return err
	}
	defer k.Free()
	if err := k.Allocate(f.FreeHost); err != nil {
		return err
	}
	r := k.Report()
	saved, workspace := k.Scratch()
	f.Memory = []model.Component{{Name: "tensors", Bytes: r.Bytes - saved - workspace},
		{Name: "saved for the backward pass", Bytes: saved},
		{Name: "workspace", Bytes: workspace}}
	before := f.total()
	f.Clock.Push(f.Job.Kind)
	defer f.Clock.Pop()
	if err := k.Compute(); err != nil {
		return err
	}
	f.cost, f.Operator, f.tokens, f.byHeads = f.total().plus(before, -1), r, k.Tokens(), k.SharesHeads()
	return nil
}

// printOperator prints the input, the plan and the memory of an operator job.
func (f *Forecast) printOperator(out io.Writer) error {
	fmt.Fprintf(out, "input            %s\nplan             %s\n\n", f.Operator.Input, f.Operator.Plan)
	return assembly.PrintComponents(out, assembly.RankPlan{Rank: "a rank", Components: f.Memory}, f.Device.Info(),
		f.HostOfNode(), model.Tiles{})
}
