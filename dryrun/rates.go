// Package dryrun predicts the time and traffic of a step without computing anything. It has a
// Device and a Comm that execute no operation and move no data; they add up the time that each
// operation would need. When the program runs on them, the sums are the time and the traffic of one
// rank of a job of any size, on this machine or on a described cluster.
//
// Measure gives the Rates of a device, Open a Device with these rates, and NewMesh the
// communicators of one rank. After the job's code has run, Device.Spent returns the Account.
//
// The model: an operation takes the longest of its arithmetic, its memory traffic and a minimum
// time. Operations of a stream run one after the other, and streams wait for each other by events
// alone, as device.Device specifies. A started all-to-all overlaps with the operations of its
// stream until Wait: a step of a ring takes as long as its computation or its all-to-all, whichever
// is longer. A rank has one link to its node and one to other nodes, and communications of all
// streams queue for them: a gather of weights delays the all-to-all that is called after it. All
// ranks are assumed to have the same speed: no rank waits for a late peer. WaitCost adds such waits
// afterwards.
package dryrun

import (
	"ulysses/comm"
	"ulysses/internal/status"
)

// Rates are the speeds of one rank for each kind of work while all ranks of its node work.
type Rates struct {
	Products float64 // FLOP/s of matrix products in the compute type
	// FLOP/s of attention's forward pass: 2·(Dk + Dv) for each query head and each pair of a query
	// with a visible key
	Attention float64
	// FLOP/s of attention's backward pass, counted as 2.5 times the forward pass (Dao 2023)
	Gradient float64
	Delta    float64 // FLOP/s of the gated delta rule's forward pass
	// FLOP/s of the gated delta rule's backward pass, counted as 2.5 times the forward pass; 0 =
	// the rate of the forward pass
	DeltaBack float64
	Stencil   float64 // bytes/s of the convolution and the gates around it; 0 = Memory
	Memory    float64 // bytes/s read or written by all other operations
	Copies    float64 // bytes/s between host and device memory; copies overlap with operations
	Host      float64 // bytes/s that a rank's CPU threads read and write in host memory; 0 = Memory
	Node      float64 // bytes/s that a rank sends to ranks of its node
	Network   float64 // bytes/s that a rank sends to ranks of other nodes
	Launch    float64 // shortest time of an operation in seconds
	Latency   float64 // shortest time of a communication over one hop, in seconds
	Message   float64 // time for which a message to another node occupies the link, in seconds
	PerNode   int     // ranks of a node
}

// Links returns the links of a rank for the model of all-to-alls.
func (r *Rates) Links() comm.Links {
	return comm.Links{Inside: comm.Link{Latency: r.Latency, Bandwidth: r.Node},
		Between:       comm.Link{Latency: r.Latency, Overhead: r.Message, Bandwidth: r.Network},
		CopyBandwidth: r.Memory}
}

// Check returns an error if a rate that has no default is not above 0.
func (r *Rates) Check() error {
	for _, x := range []struct {
		name string
		rate float64
	}{{"products", r.Products}, {"attention", r.Attention}, {"gradient", r.Gradient}, {"delta", r.Delta},
		{"memory", r.Memory}, {"copies", r.Copies},
		{"node", r.Node}, {"network", r.Network}} {
		if !(x.rate > 0) {
			return status.Errorf(status.InvalidArgument, "dryrun: the rate of %s is %v; give a rate above 0",
				x.name, x.rate)
		}
	}
	if r.PerNode < 1 {
		return status.Errorf(status.InvalidArgument, "dryrun: %d ranks per node; give 1 or more", r.PerNode)
	}
	return nil
}

// Shared returns the rates of one rank if that many ranks share its cores: each rate divided by
// ranks. Launch, Latency and PerNode stay. With one rank or fewer to a core nothing changes.
func (r Rates) Shared(ranks float64) Rates {
	if ranks > 1 {
		for _, x := range []*float64{&r.Products, &r.Attention, &r.Gradient, &r.Delta, &r.DeltaBack, &r.Stencil,
			&r.Memory, &r.Copies, &r.Host, &r.Node, &r.Network} {
			*x /= ranks
		}
	}
	return r
}
