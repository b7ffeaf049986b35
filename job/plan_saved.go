package job

import (
	"fmt"

	"ulysses/dryrun"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/model"
)

func attentionSubject(j *file.Job) (*subject, error) {
	in, err := openAttention(&j.Attention, false)
	defer in.close()
	if err != nil {
		return nil, err
	}
	return &subject{rows: []int64{in.sq, in.sk}, heads: [][2]int64{{in.hq, in.hkv}}, shape: dryrun.Shape{Hidden: in.hq * in.d, Dim: in.d}}, nil
}

func gdnSubject(j *file.Job) (*subject, error) {
	in, err := openGDN(&j.GDN, false)
	defer in.close()
	if err != nil {
		return nil, err
	}
	return &subject{rows: []int64{in.s}, heads: [][2]int64{{in.hv, in.hk}},
		shape: dryrun.Shape{Hidden: in.hv * in.dv, Dim: in.dk, KeyDim: in.dk, ValueDim: in.dv}}, nil
}

// rehearseSaved goes through a job on saved tensors, of which the file's header and lists of
// documents are read.
func (f *forecast) rehearseSaved() error {
	k, err := openSavedJob(f.Env, false)
	if err != nil {
		return err
	}
	r := k.base()
	defer r.free()
	if err := r.allocate(k); err != nil {
		return err
	}
	saved, workspace := k.scratch()
	f.memory = []model.Component{{Name: "tensors", Bytes: r.report.Bytes - saved.Bytes() - workspace.Bytes()}, {Name: "saved for the backward pass", Bytes: saved.Bytes()},
		{Name: "workspace", Bytes: workspace.Bytes()}}
	if all := f.Device.Info().Memory; all > 0 && r.report.Bytes > all {
		return status.Errorf(status.OutOfMemory, "plan: %s are planned for each rank, and its device has %s: use more ranks, so that each holds fewer rows and heads",
			units.Bytes(r.report.Bytes), units.Bytes(all))
	}
	if err := f.hostHolds(); err != nil {
		return err
	}
	before := f.so()
	f.Clock.Push(f.Job.Kind)
	defer f.Clock.Pop()
	if err := k.compute(); err != nil {
		return err
	}
	f.took, f.saved, f.tokens = f.so().plus(before, -1), &r.report, k.tokens()
	return nil
}

func (f *forecast) printSaved() error {
	fmt.Fprintf(f.Stdout, "input            %s\nplan             %s\n\n", f.saved.Input, f.saved.Plan)
	return printMemory(f.Stdout, f.memory, f.Device.Info(), 0)
}
