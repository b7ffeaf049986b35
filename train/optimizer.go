package train

import (
	"math"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Rate returns the learning rate of step s, counted from 0, of a run of the given number of steps.
// A linear warmup lr·(s+1)/warmup comes first. Then the rate is constant, or falls on a line or
// half a cosine from lr at the first step after warmup to min_lr at the last step (Loshchilov &
// Hutter 2017, without restarts). Schedule wsd (warmup, stable, decay; Hu et al. 2024, MiniCPM) is
// constant until the last Decay steps, in which the rate falls to min_lr at the last step. The
// schedule, with its warmup and all shares of steps, is of the steps after the first Begin. If it
// has one step, this step has the rate lr: with min_lr it might train nothing.
func (o *OptimizerConfig) Rate(s, steps int64) float64 {
	warmup := o.WarmupSteps(steps)
	s, steps = s-o.Begin, steps-o.Begin
	if s < warmup {
		return o.LR * float64(s+1) / float64(warmup)
	}
	if steps == 1 {
		return o.LR
	}
	first, last := warmup, steps-1 // the steps with lr and min_lr
	shape := o.Schedule
	switch o.Schedule {
	case "constant":
		return o.LR
	case "wsd":
		first, shape = max(warmup, steps-stepsOf(o.Decay, steps)), o.DecayShape
		if s < first {
			return o.LR
		}
		first-- // the first step of the decay is below lr
	}
	t := 1.0
	if n := last - first; n > 0 {
		t = min(1, float64(s-first)/float64(n))
	}
	share := 0.5 * (1 + math.Cos(math.Pi*t))
	switch shape {
	case "linear":
		share = 1 - t
	case "1-sqrt":
		share = 1 - math.Sqrt(t)
	}
	return o.MinLR + (o.LR-o.MinLR)*share
}

// WarmupSteps returns the number of steps of the warmup in a run of the given number of steps.
func (o *OptimizerConfig) WarmupSteps(steps int64) int64 { return stepsOf(o.Warmup, steps-o.Begin) }

// decayStart returns the first step of the decay of schedule wsd, counted from 0.
func (o *OptimizerConfig) decayStart(steps int64) int64 {
	return steps - stepsOf(o.Decay, steps-o.Begin)
}

// stepsOf returns a number of steps that is given as such, or as a share of all steps below 1.
func stepsOf(x float64, steps int64) int64 {
	if x < 1 {
		return int64(math.Ceil(x * float64(steps)))
	}
	return int64(x)
}

// sameUntil reports whether another number of steps of the run changes no rate before step s.
func (o *OptimizerConfig) sameUntil(s, steps, other int64) bool {
	if o.WarmupSteps(steps) != o.WarmupSteps(other) {
		return false
	}
	return o.Schedule == "constant" || o.Schedule == "wsd" && s <= min(o.decayStart(steps), o.decayStart(other))
}

// decays returns the weight decay of a parameter: that of the first group of [[optimizer.group]]
// which matches it, otherwise weight_decay for tensors with two or more dimensions, and 0 for
// others.
func (o *OptimizerConfig) decays() (func(*model.Param) float64, error) {
	var groups []model.Patterns
	for _, g := range o.Group {
		p, err := model.ParsePatterns(g.Match)
		if err != nil {
			return nil, status.Errorf(status.Of(err), "optimizer.group: %w", err)
		}
		groups = append(groups, p)
	}
	return func(p *model.Param) float64 {
		for i, patterns := range groups {
			if patterns.Match(p.Name) >= 0 {
				return o.Group[i].WeightDecay
			}
		}
		if p.Decay {
			return o.WeightDecay
		}
		return 0
	}, nil
}

// checkGroups returns an error if a pattern of [[optimizer.group]] matches no parameter.
func (o *OptimizerConfig) checkGroups(groups []*model.Group) error {
	for _, x := range o.Group {
		for _, text := range x.Match {
			patterns, err := model.ParsePatterns([]string{text})
			if err != nil {
				return status.Errorf(status.Of(err), "optimizer.group: %w", err)
			}
			found, example := false, ""
			for _, g := range groups {
				for _, p := range g.Params {
					found, example = found || patterns.Match(p.Name) >= 0, p.Name
				}
			}
			if !found {
				return status.Errorf(status.InvalidConfig,
					"optimizer.group: %q matches no trained parameter of the model; a pattern matches whole names such as %s, with * for any characters",
					text, example)
			}
		}
	}
	return nil
}

// kinds returns the number of checkpoint.Kinds that the optimizer has.
func (o *OptimizerConfig) kinds() int {
	if o.Name == "adamw" {
		return 3
	}
	return 1
}

// Stepper runs optimizer steps. A device.Device is one.
type Stepper interface {
	AdamW(s device.Stream, a *device.AdamW) error
	SGD(s device.Stream, a *device.SGD) error
}

// optimizer calls AdamW or SGD for the buckets of a rank. It keeps the argument structs, so that no
// step allocates.
type optimizer struct {
	*OptimizerConfig
	offload
	dev     device.Device
	decayOf func(*model.Param) float64 // weight decay; nil for an evaluation
	buckets []bucket
	adamw   device.AdamW
	sgd     device.SGD
}

// bucket has the weights and moments that one call updates. Weight decay applies to the elements of
// decay alone.
type bucket struct {
	State
	grads       tensor.Tensor // [Hi - Lo] F32
	decay       []device.Range
	weightDecay float64
}

// decays are elements with a weight decay above 0.
type decays struct {
	device.Range
	weightDecay float64
}

// addDecay appends the elements [lo, hi) of a parameter, unless its weight decay is 0. It extends
// the last range if that ends there with the same weight decay.
func (o *optimizer) addDecay(all []decays, p *model.Param, lo, hi int64) []decays {
	x := decays{device.Range{Lo: lo, Hi: hi}, o.decayOf(p)}
	if x.weightDecay == 0 || lo >= hi {
		return all
	}
	if last := len(all) - 1; last >= 0 && all[last].Hi == lo && all[last].weightDecay == x.weightDecay {
		all[last].Hi = hi
		return all
	}
	return append(all, x)
}

// add adds the elements that this rank owns of a group, or of all groups, with their weight decay,
// in order. If states are offloaded, they are divided into buckets of at most the size of a slot. A
// bucket has one weight decay.
func (o *optimizer) add(x bucket, all []decays) {
	for from := int64(0); from < x.Hi-x.Lo; {
		to, part := x.Hi-x.Lo, bucket{State: x.State, grads: x.grads}
		for _, r := range all {
			if r.Hi <= from {
				continue
			}
			if part.weightDecay > 0 && r.weightDecay != part.weightDecay {
				to = r.Lo
				break
			}
			part.weightDecay, part.decay = r.weightDecay, append(part.decay, r.Range)
		}
		o.divide(part, from, to)
		from = to
	}
}

// divide adds the elements [from, to) of x in buckets of at most the size of a slot.
func (o *optimizer) divide(x bucket, from, to int64) {
	each := to - from
	if o.Offloaded() {
		each = o.largest
	}
	for at := from; at < to; at += each {
		lo, hi := at, min(to, at+each)
		cut := func(t tensor.Tensor) tensor.Tensor {
			if t.IsNil() {
				return t
			}
			return t.Slice(0, lo, hi)
		}
		b := bucket{State: State{Lo: x.Lo + lo, Hi: x.Lo + hi, Master: cut(x.Master), Compute: cut(x.Compute),
			M: cut(x.M), V: cut(x.V)},
			grads: cut(x.grads), decay: []device.Range{}, weightDecay: x.weightDecay}
		for _, r := range x.decay {
			if from, to := max(r.Lo, lo), min(r.Hi, hi); from < to {
				b.decay = append(b.decay, device.Range{Lo: from - lo, Hi: to - lo})
			}
		}
		o.buckets = append(o.buckets, b)
	}
}

// update runs step t, counted from 1, with the gradients multiplied by scale.
func (o *optimizer) update(s device.Stream, lr, scale float64, t int64) error {
	o.adamw = device.AdamW{LR: lr, Beta1: o.Betas[0], Beta2: o.Betas[1], Eps: o.Eps, GradScale: scale, Step: t}
	o.sgd = device.SGD{LR: lr, GradScale: scale}
	switch o.Step {
	case StepStreamed:
		return o.stream(s)
	case StepOnHost:
		return o.onHost(s)
	}
	for i := range o.buckets {
		if err := o.step(o.dev, s, &o.buckets[i]); err != nil {
			return err
		}
	}
	return nil
}

// step runs the step for one bucket, whose tensors are in the memory of the stepper.
func (o *optimizer) step(by Stepper, s device.Stream, b *bucket) error {
	if o.Name == "adamw" {
		o.adamw.WeightDecay = b.weightDecay
		o.adamw.W, o.adamw.G, o.adamw.M, o.adamw.V, o.adamw.Low, o.adamw.Decay = b.Master, b.grads, b.M, b.V,
			b.Compute, b.decay
		return by.AdamW(s, &o.adamw)
	}
	o.sgd.WeightDecay = b.weightDecay
	o.sgd.W, o.sgd.G, o.sgd.Low, o.sgd.Decay = b.Master, b.grads, b.Compute, b.decay
	return by.SGD(s, &o.sgd)
}
