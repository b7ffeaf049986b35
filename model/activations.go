package model

import (
	"fmt"
	"strings"

	"ulysses/internal/status"
)

// Policy is what happens to a category of saved activations between the forward and the backward
// half of a pass.
type Policy uint8

const (
	Keep      Policy = iota // they stay in device memory
	Recompute               // the backward half computes them again
	Offload                 // they are copied to host memory and back, while layers compute
)

func (f Policy) String() string { return [...]string{"keep", "recompute", "offload"}[f] }

// Activations are the policies of saved activations. Gradients do not depend on them: recomputed
// activations are bitwise equal, if the device's operations are bitwise reproducible.
type Activations struct {
	// BlockInput, Keep or Offload, is the residual stream before every Segment-th layer. The inputs
	// of the other layers are recomputed by one more forward pass over the segment (Chen et al.
	// 2016).
	BlockInput Policy
	Segment    int64 // layers; 0 = 1

	// Attention is the output of attention and its statistics (LSE); of latent attention also the
	// compressed vectors; of linear attention everything that its backward pass reads, except the
	// gate's input. Recompute also needs QKV recomputed.
	Attention Policy
	// QKV is queries, keys and values, and q and k before their norms; of linear attention the
	// gate's input.
	QKV Policy
	MLP Policy // the residual stream before the MLP and, unless it runs in tiles, gate and up

	// HeadGroups is the number of groups of heads of softmax attention. The all-to-all and
	// attention run for one group after the other, so only q, k and v of one group exist for all
	// tokens (Ghadia et al. 2026, arXiv:2602.21196). It divides the number of key heads. 0 = 1.
	HeadGroups int64
}

// policies returns the policy of each category.
func (a *Activations) policies() [categories]Policy {
	return [categories]Policy{a.BlockInput, a.QKV, a.Attention, a.MLP}
}

func (a Activations) segment() int64 { return max(1, a.Segment) }
func (a Activations) groups() int64  { return max(1, a.HeadGroups) }

// Offloads reports whether any category is offloaded.
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
	parts = append(parts, "block input "+input, "attention "+a.Attention.String(), "qkv "+a.QKV.String(),
		"mlp "+a.MLP.String())
	if a.groups() > 1 {
		parts = append(parts, fmt.Sprintf("heads in %d groups", a.groups()))
	}
	return strings.Join(parts, ", ")
}

// SetActivations sets the policies of the following passes and of Memory. Collective if the number
// of head groups is new.
func (m *Model) SetActivations(a Activations) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "model.SetActivations: "+format, args...)
	}
	switch groups := a.groups(); {
	case a.BlockInput == Recompute:
		return bad("block_input cannot be recomputed; keep or offload it, of every Segment-th layer")
	case a.Segment < 0 || a.HeadGroups < 0:
		return bad("segments of %d layers, %d head groups; set both to 0 or more", a.Segment, a.HeadGroups)
	case a.Attention == Recompute && a.QKV != Recompute:
		return bad("attention is recomputed and qkv is not; recompute qkv as well, attention needs it")
	case m.plans.fulls() > 0 && m.Config.NumKeyValueHeads%groups != 0:
		return bad("%d head groups do not divide the %d key heads; use a divisor", groups, m.Config.NumKeyValueHeads)
	}
	if err := m.plans.setGroups(m.dev, m.comm, m.Config, m.compute, a.groups()); err != nil {
		return err
	}
	if a.Offloads() {
		if err := m.openOffloader(); err != nil {
			return err
		}
	}
	m.activations = a
	m.orders = map[bool][]Use{false: m.order(false), true: m.order(true)}
	m.visits = m.backwardOrder()
	return nil
}

// Activations returns the policies.
func (m *Model) Activations() Activations { return m.activations }

// segments returns the number of segments.
func (m *Model) segments() int64 {
	n, k := int64(len(m.blocks)), m.activations.segment()
	return (n + k - 1) / k
}

// segmentAt returns the layers [lo, hi) of a segment.
func (m *Model) segmentAt(s int64) (lo, hi int64) {
	k := m.activations.segment()
	return s * k, min((s+1)*k, int64(len(m.blocks)))
}
