// Package dryrun is a device and communicators on which nothing is computed and nothing moves:
// operations are taken at their word, and what they would take is added up. The program itself, run
// on them, tells the time and the traffic of a step for any rank of any number of them, on a
// machine that need not be there.
//
// An operation takes the longest of its arithmetic, its bytes and a least time; what a stream holds
// takes place one after the other, and streams wait for each other by events alone, as
// device.Device has it. Ranks are in step: nobody waits for a peer that is late.
package dryrun

import "ulysses/internal/status"

// Rates is what one rank gets done of each kind of work while all ranks of its node are at work.
type Rates struct {
	Products float64 // FLOP/s of matrix products in the compute type
	// FLOP/s of attention forward: 2·(Dk + Dv) per query head and pair of a query with a key that
	// it sees
	Attention float64
	Gradient  float64 // FLOP/s of its backward, counted as 2.5 times forward (Dao 2023)
	Delta     float64 // FLOP/s of the gated delta rule
	DeltaBack float64 // FLOP/s of its backward, counted as 2.5 times forward; 0 = as forward
	Stencil   float64 // bytes/s of the convolution and the gates around it; 0 = as everything else
	Memory    float64 // bytes/s read or written by everything else
	Copies    float64 // bytes/s between the host's memory and a device's, which run beside the work
	Node      float64 // bytes/s that a rank sends to ranks of its node
	Network   float64 // bytes/s that it sends to those of other nodes
	Launch    float64 // seconds that an operation takes at least
	Latency   float64 // seconds that an exchange takes at least
	PerNode   int     // ranks of a node
}

// Check refuses rates of which one is not known.
func (r *Rates) Check() error {
	for _, x := range []struct {
		name string
		rate float64
	}{{"products", r.Products}, {"attention", r.Attention}, {"gradient", r.Gradient}, {"delta", r.Delta}, {"memory", r.Memory}, {"copies", r.Copies},
		{"node", r.Node}, {"network", r.Network}} {
		if !(x.rate > 0) {
			return status.Errorf(status.InvalidArgument, "the rate of %s is %v: it must be above 0", x.name, x.rate)
		}
	}
	if r.PerNode < 1 {
		return status.Errorf(status.InvalidArgument, "dryrun: %d ranks of a node: give 1 or more", r.PerNode)
	}
	return nil
}

// Shared is what is left to each of so many that take turns: arithmetic, memory and copies; 1 and
// less leave all.
func (r Rates) Shared(among float64) Rates {
	if among > 1 {
		for _, x := range []*float64{&r.Products, &r.Attention, &r.Gradient, &r.Delta, &r.DeltaBack, &r.Stencil, &r.Memory, &r.Copies, &r.Node, &r.Network} {
			*x /= among
		}
	}
	return r
}
