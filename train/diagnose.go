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

// If a loss or a gradient norm is NaN or Inf, all ranks detect it, but they do not know its origin.
// They search together: the weights, then the tensors of the passes, which are run again, in order
// of execution, then the reduced gradients. Each rank records its first tensor with NaN or Inf. The
// earliest one of all ranks is reported. The search has no cost in steps with finite values.

// finding is a rank's first tensor with a value that is NaN or Inf.
type finding struct {
	Order int64  // number of the tensor in the search; equal for the same tensor on every rank
	Where string // "layer 3, attention output"
	What  string // "NaN at [0 3], 2 of this rank's 64 values"
	Host  string
}

// diagnosis is the state of a search.
type diagnosis struct {
	*Trainer
	scanner scanner
	seen    int64  // tensors searched so far
	within  string // "micro-batch 2 of 3, ", or ""
	first   *finding
}

// diagnose returns in which tensor NaN or Inf was first seen, and the fix. again repeats the passes
// of the step. If gradients is set, the passes compute gradients, which are searched as well. An
// error is an error of the search. Collective.
func (t *Trainer) diagnose(again func(x *diagnosis) error, gradients bool) (seen, fix string, err error) {
	t.Clock.Push("diagnosis")
	defer t.Clock.Pop()
	x := &diagnosis{Trainer: t,
		scanner: scanner{dev: t.Device, stream: t.stream, barrier: func() error {
			if t.alone { // other ranks have another sequence, with other tiles, or none
				return nil
			}
			return comm.BarrierBeforeSync(t.Mesh.Seq)
		}}}
	defer func() { t.inspect = nil }()
	for _, area := range []struct {
		search func() error
		fix    string
		needed bool
	}{
		{x.weights, "resume from an older checkpoint, with a lower optimizer.lr", true},
		{func() error { t.inspect = x.look; return again(x) },
			"lower optimizer.lr, or set train.on_nan = \"skip\" to skip such steps", true},
		{x.sums, "lower optimizer.lr, or set train.on_nan = \"skip\" to skip such steps", gradients},
	} {
		if !area.needed {
			continue
		}
		if err := area.search(); err != nil {
			return "", "", err
		}
		if seen, err = x.agree(); err != nil || seen != "" {
			return seen, area.fix, err
		}
	}
	return "all values are finite when the step is computed again, so the fault is not reproducible",
		"check the hardware of the ranks, and resume from a checkpoint", nil
}

// look searches a tensor of a pass. It is the model's Inspect function.
func (x *diagnosis) look(at string, v tensor.Tensor) error {
	x.seen++
	bad, err := x.scanner.scan(v, x.first == nil)
	if err == nil && bad.count > 0 {
		x.found(x.within+strings.Replace(at, ": ", ", ", 1), bad, v.Dims())
	}
	return err
}

func (x *diagnosis) found(where string, bad badValues, shape []int64) {
	host, _ := os.Hostname()
	x.first = &finding{Order: x.seen, Where: where, Host: host,
		What: fmt.Sprintf("%v at %v, %d of this rank's %d values", bad.value, unravel(bad.first, shape),
			bad.count, bad.of)}
}

// weights searches the weights that this rank owns.
func (x *diagnosis) weights() error {
	for _, g := range x.Weights.Stored() {
		state, first := g.State, int64(0)
		for _, p := range g.Params {
			lo, hi := max(state.Lo, first), min(state.Hi, first+p.Numel())
			own := tensor.Tensor{}
			if lo < hi {
				own = state.slice(0, lo, hi)
			}
			x.seen++
			bad, err := x.scanner.scan(own, x.first == nil)
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

// sums reduces the gradients over the ranks, and searches the sums.
func (x *diagnosis) sums() error {
	if _, err := x.Weights.Reduce(x.stream); err != nil {
		return err
	}
	x.within = ""
	for _, g := range x.Weights.Portions() {
		if g.Frozen {
			continue
		}
		all, err := x.Weights.Whole(g, true, x.stream)
		if err == nil {
			err = comm.BarrierBeforeSync(x.Mesh.World)
		}
		first := int64(0)
		for _, p := range g.Params {
			if err == nil {
				err = x.look(g.Name+": gradient of "+p.Name+", summed over micro-batches and ranks",
					all.Slice(0, first, first+p.Numel()).View(p.Shape...))
			}
			first += p.Numel()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// agree returns a description of the earliest finding of all ranks. If several ranks have a finding
// for this tensor, it describes the finding of the lowest rank. It returns "" if no rank has one.
// Collective.
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
			return "", status.Errorf(status.Internal, "train: the diagnosis of rank %d cannot be decoded: %w", r, err)
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
	return fmt.Sprintf("first seen in %s, on rank %d (host %s): %s; found on %d of %d ranks",
		earliest.Where, rank, earliest.Host, earliest.What, ranks, len(all)), nil
}
