package model

import (
	"fmt"
	"strings"

	"ulysses/internal/status"
)

// Policy is what becomes of activations of a kind between the forward and the backward pass.
type Policy uint8

const (
	Keep      Policy = iota // they stay where they are
	Recompute               // backward computes them again
	Offload                 // they go to the host's memory and come back, while layers compute
)

func (f Policy) String() string { return [...]string{"keep", "recompute", "offload"}[f] }

// Activations says what a pass keeps for its backward half. Gradients do not depend on it: what is
// computed again has the same bits, if the device's operations are repeatable.
type Activations struct {
	// BlockInput, Keep or Offload, is the residual stream before a layer: of every Segment-th one.
	// Those between are computed again, by one more forward pass over the segment (Chen et al.
	// 2016).
	BlockInput Policy
	Segment    int64 // layers; 0 = 1

	// Attention is its output and what its backward needs beside q, k and v (the LSE); of linear
	// attention everything but the gate's input. Recomputed it takes QKV along.
	Attention Policy
	// queries, keys and values as attention takes them, and before their norms; of linear attention
	// the gate's input
	QKV Policy
	MLP Policy // the residual stream before the MLP and, unless it runs in tiles, gate and up

	// HeadGroups cuts the heads of softmax attention into so many groups, which go through the
	// exchange and attention one after the other, so that q, k and v of one group only are there in
	// whole (Ghadia et al. 2026, arXiv:2602.21196). It divides the key heads. 0 = 1.
	HeadGroups int64
}

// policies by kind.
func (a *Activations) policies() [categories]Policy {
	return [categories]Policy{a.BlockInput, a.QKV, a.Attention, a.MLP}
}

func (a Activations) segment() int64 { return max(1, a.Segment) }
func (a Activations) groups() int64  { return max(1, a.HeadGroups) }

// Offloads says whether anything goes to the host.
func (a Activations) Offloads() bool {
	for _, f := range a.policies() {
		if f == Offload {
			return true
		}
	}
	return false
}

func (a Activations) String() string {
	var parts []string
	input := a.BlockInput.String()
	if a.segment() > 1 {
		input += fmt.Sprintf(" of every %d layers", a.segment())
	}
	parts = append(parts, "block input "+input, "attention "+a.Attention.String(), "qkv "+a.QKV.String(), "mlp "+a.MLP.String())
	if a.groups() > 1 {
		parts = append(parts, fmt.Sprintf("heads in %d groups", a.groups()))
	}
	return strings.Join(parts, ", ")
}

// SetActivations is for between passes; Memory goes by it. It is collective where head groups are
// new.
func (m *Model) SetActivations(a Activations) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "model.SetActivations: "+format, args...)
	}
	switch groups := a.groups(); {
	case a.BlockInput == Recompute:
		return bad("every block's input recomputed: keep or offload those of every Segment-th layer")
	case a.Segment < 0 || a.HeadGroups < 0:
		return bad("segments of %d layers, %d head groups: give 0 or more", a.Segment, a.HeadGroups)
	case a.Attention == Recompute && a.QKV != Recompute:
		return bad("attention is recomputed and qkv is not: q, k and v come along with attention, recompute them too")
	case m.plans.fulls > 0 && m.Config.NumKeyValueHeads%groups != 0:
		return bad("%d head groups do not divide the %d key heads: use a divisor", groups, m.Config.NumKeyValueHeads)
	}
	if err := m.plans.group(m.dev, m.comm, m.Config, m.compute, a.groups()); err != nil {
		return err
	}
	if a.Offloads() {
		if err := m.open(); err != nil {
			return err
		}
	}
	m.activations = a
	m.orders = map[bool][]Use{false: m.order(false), true: m.order(true)}
	m.visits = m.visitsOf()
	return nil
}

// Activations are as they were set.
func (m *Model) Activations() Activations { return m.activations }

// segments is how many there are, and bounds the layers of one.
func (m *Model) segments() int64 {
	n, k := int64(len(m.blocks)), m.activations.segment()
	return (n + k - 1) / k
}

func (m *Model) segmentAt(s int64) (lo, hi int64) {
	k := m.activations.segment()
	return s * k, min((s+1)*k, int64(len(m.blocks)))
}
