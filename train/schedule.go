package train

import "math"

// Rate is the learning rate of step s, counted from 0: a linear warmup of lr·(s+1)/warmup, then
// constant, or a line or half a cosine from lr at the first step after warmup to min_lr at the last
// step (Loshchilov & Hutter 2017, without restarts).
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
