package train

import (
	"math"

	"ulysses/device"
	"ulysses/tensor"
)

// Rate returns the learning rate of step s, counted from 0, of a run of the given number of steps.
// A linear warmup lr·(s+1)/warmup comes first. Then the rate is constant, or falls on a line or
// half a cosine from lr at the first step after warmup to min_lr at the last step (Loshchilov &
// Hutter 2017, without restarts).
func (o *OptimizerConfig) Rate(s, steps int64) float64 {
	if s < o.Warmup {
		return o.LR * float64(s+1) / float64(o.Warmup)
	}
	if o.Schedule == "constant" {
		return o.LR
	}
	t := 1.0
	if n := steps - 1 - o.Warmup; n > 0 {
		t = min(1, float64(s-o.Warmup)/float64(n))
	}
	if o.Schedule == "linear" {
		return o.MinLR + (o.LR-o.MinLR)*(1-t)
	}
	return o.MinLR + (o.LR-o.MinLR)*0.5*(1+math.Cos(math.Pi*t))
}

// kinds returns the number of checkpoint.Kinds that the optimizer has.
func (o *OptimizerConfig) kinds() int {
	if o.Name == "adamw" {
		return 3
	}
	return 1
}

// optimizer calls the device's AdamW or SGD. It keeps the argument structs, so that no step
// allocates.
type optimizer struct {
	*OptimizerConfig
	adamw device.AdamW
	sgd   device.SGD
}

// update runs step t, counted from 1, for the weights of x with gradients [Hi - Lo] F32, multiplied
// by scale. Weight decay applies to the ranges of decay alone.
func (o *optimizer) update(d device.Device, s device.Stream, x State, grads tensor.Tensor, decay []device.Range, lr, scale float64, t int64) error {
	if o.Name == "adamw" {
		o.adamw = device.AdamW{W: x.Master, G: grads, M: x.M, V: x.V, Low: x.Compute, LR: lr, Beta1: o.Betas[0], Beta2: o.Betas[1],
			Eps: o.Eps, WeightDecay: o.WeightDecay, GradScale: scale, Decay: decay, Step: t}
		return d.AdamW(s, &o.adamw)
	}
	o.sgd = device.SGD{W: x.Master, G: grads, Low: x.Compute, LR: lr, WeightDecay: o.WeightDecay, GradScale: scale, Decay: decay}
	return d.SGD(s, &o.sgd)
}
