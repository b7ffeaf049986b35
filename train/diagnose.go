package train

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// A loss or a gradient that is no number is known to all ranks alike, but not where it comes from.
// Then all of them look for it together: among the weights, in the tensors of the passes, done once
// more, in the order of the work, and in the gradients' sum. Each keeps the first that is not
// finite; the earliest of these is named. Nothing of this costs anything while numbers are numbers.

// finding is a rank's first tensor that is not finite.
type finding struct {
	Order int64  // of what was looked at: the same work has the same number on every rank
	Where string // "layer 3, attention output"
	What  string // "NaN at [0 3], 2 of this rank's 64 values"
	Host  string
}

// diagnosis is one search.
type diagnosis struct {
	*Trainer
	scanner scanner
	seen    int64
	micro   string // "micro step 2 of 3, "
	first   *finding
}

// diagnose searches and says what to do: the sentence that names the tensor, and the remedy. again
// does the passes once more, with gradients or without. An error is of the search itself.
// Collective.
func (t *Trainer) diagnose(again func(x *diagnosis) error, gradients bool) (seen, remedy string, err error) {
	t.Clock.Push("diagnosis")
	defer t.Clock.Pop()
	x := &diagnosis{Trainer: t, scanner: scanner{dev: t.Device, stream: t.stream, meet: func() error { return comm.Meet(t.Mesh.Seq) }}}
	defer func() { t.inspect = nil }()
	for _, part := range []struct {
		look   func() error
		remedy string
		needed bool
	}{
		{x.weights, "the weights were lost before: go on from an older checkpoint, with a lower optimizer.lr", true},
		{func() error { t.inspect = x.look; return again(x) }, "lower optimizer.lr, look at the data, or set train.on_nan = \"skip\"", true},
		{x.sums, "lower optimizer.lr, look at the data, or set train.on_nan = \"skip\"", gradients},
	} {
		if !part.needed {
			continue
		}
		if err := part.look(); err != nil {
			return "", "", err
		}
		if seen, err = x.agree(); err != nil || seen != "" {
			return seen, part.remedy, err
		}
	}
	return "all is finite when it is computed once more, so that it is not reproducible",
		"look at the hardware of the ranks, and go on from a checkpoint", nil
}

// look is shown a tensor by a pass.
func (x *diagnosis) look(at string, v tensor.Tensor) error {
	x.seen++
	bad, err := x.scanner.scan(v, x.first == nil)
	if err == nil && bad.count > 0 {
		x.found(x.micro+strings.Replace(at, ": ", ", ", 1), bad, v.Dims())
	}
	return err
}

func (x *diagnosis) found(where string, bad badValues, shape []int64) {
	host, _ := os.Hostname()
	x.first = &finding{Order: x.seen, Where: where, Host: host,
		What: fmt.Sprintf("%v at %v, %d of this rank's %d values", bad.value, unravel(bad.first, shape), bad.count, bad.of)}
}

// weights looks at the elements that this rank keeps.
func (x *diagnosis) weights() error {
	for i, g := range x.Model.Groups() {
		state, first := x.Weights.State(i), int64(0)
		for _, p := range g.Params {
			lo, hi := max(state.Lo, first), min(state.Hi, first+p.Numel())
			kept := tensor.Tensor{}
			if lo < hi {
				kept = state.part(0, lo, hi)
			}
			x.seen++
			bad, err := x.scanner.scan(kept, x.first == nil)
			if err != nil {
				return err
			}
			if bad.count > 0 {
				bad.first += lo - first
				x.found(fmt.Sprintf("%s, weight %s, before the step", g.Name, p.Name), bad, p.Shape)
			}
			first += p.Numel()
		}
	}
	return nil
}

// sums looks at the gradients once they are added up over the ranks, which were finite on each of
// them.
func (x *diagnosis) sums() error {
	if _, err := x.Weights.Reduce(x.stream); err != nil {
		return err
	}
	x.micro = ""
	for i, g := range x.Model.Groups() {
		all, err := x.Weights.Whole(i, true, x.stream)
		if err == nil {
			err = comm.Meet(x.Mesh.World)
		}
		first := int64(0)
		for _, p := range g.Params {
			if err == nil {
				err = x.look(g.Name+": gradient of "+p.Name+", summed over micro steps and ranks", all.Slice(0, first, first+p.Numel()).View(p.Shape...))
			}
			first += p.Numel()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// agree is the sentence about the earliest finding of all ranks, of several at the same place the
// lowest rank's; "" when there is none. Collective.
func (x *diagnosis) agree() (string, error) {
	mine, err := json.Marshal(x.first)
	if err != nil {
		return "", status.Errorf(status.Internal, "train: %w", err)
	}
	all, err := comm.GatherBytes(x.Mesh.World, mine)
	if err != nil {
		return "", err
	}
	var earliest *finding
	rank, ranks := 0, 0
	for r, text := range all {
		var f *finding
		if err := json.Unmarshal(text, &f); err != nil {
			return "", status.Errorf(status.Internal, "train: rank %d's finding: %w", r, err)
		}
		switch {
		case f == nil:
		case earliest == nil || f.Order < earliest.Order:
			earliest, rank, ranks = f, r, 1
		case f.Order == earliest.Order:
			ranks++
		}
	}
	if earliest == nil {
		return "", nil
	}
	return fmt.Sprintf("first seen in %s, on rank %d (host %s): %s; there on %d of %d ranks",
		earliest.Where, rank, earliest.Host, earliest.What, ranks, len(all)), nil
}

// notANumber deals with a step whose loss or gradient is none on a rank: the error that ends the
// run, or nil when the step is to be left out. Loss and norm are the same on all ranks, or a rank
// counts wrongly; the others have taken the step by then. Collective.
func (t *Trainer) notANumber(r *Record, rank int, alone bool) error {
	if alone {
		return shared{status.Errorf(status.Numeric, "train: step %d: loss or gradient norm is no number on rank %d and is one on others, though they have the same sums: look at the hardware of rank %d, and go on from a checkpoint",
			r.Step, rank, rank)}
	}
	skip := t.OnNaN == "skip"
	r.Skipped = skip
	if skip && t.diagnosed { // it costs a step's time, and a run that skips has many
		return nil
	}
	t.diagnosed = true
	seen, remedy, err := t.diagnose(func(x *diagnosis) error {
		if err := t.Weights.Begin(t.stream, int64(len(t.micros))); err != nil {
			return err
		}
		for i, m := range t.micros {
			if len(t.micros) > 1 {
				x.micro = fmt.Sprintf("micro step %d of %d, ", i+1, len(t.micros))
			}
			if _, err := t.pass(m, r.TargetTokens, true, false); err != nil {
				return err
			}
		}
		return nil
	}, true)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("step %d: loss %g, gradient norm %g: %s", r.Step, float64(r.Loss), float64(r.GradNorm), seen)
	if !skip {
		return shared{status.Errorf(status.Numeric, "train: %s: %s", what, remedy)}
	}
	if t.OnSkip != nil {
		t.OnSkip(what)
	}
	return nil
}

// evaluationIsNoNumber is the error of an evaluation whose loss is none. Collective.
func (t *Trainer) evaluationIsNoNumber(step int64, loss float64) error {
	seen, remedy, err := t.diagnose(func(*diagnosis) error { _, _, err := t.evaluate(); return err }, false)
	if err != nil {
		return err
	}
	return shared{status.Errorf(status.Numeric, "train: evaluation after step %d: loss %g: %s: %s", step, loss, seen, remedy)}
}
