package comm

import (
	"fmt"

	"ulysses/internal/status"
)

// levelModel is a communicator of a dry run, which only models the time of two levels.
type levelModel interface {
	ServesTwoLevels() bool
	ModelTwoLevels(nodes, perNode int)
}

// SetLevels gives the all-to-alls of the sequence axis two levels (NewTwoLevel), or leaves them
// direct. how is "on", "off" or "auto": two levels if all-to-alls of so many bytes a rank, its own
// block included, then take less time by m.Links. why says what was chosen, and is "" if there is
// no choice, as for ranks on one node; of "on" it then says that it has no effect. Results do not
// depend on it. The choice uses only values that are equal on all ranks. "on" is Unsupported if the
// nodes have different numbers of ranks, or if the communicator has no two levels; "auto" is then
// direct. Collective over the sequence axis.
func (m *Mesh) SetLevels(how string, bytes int64) (why string, err error) {
	const key = "parallel.two_level"
	if m.TwoLevel() != nil {
		return "", nil // by an earlier call
	}
	ranks, uneven := byNode(key, m.Nodes, len(m.Nodes)) // of each node
	model, dry := m.Seq.inner.(levelModel)
	served := dry && model.ServesTwoLevels() || !dry && serves("", m.Seq.inner) == nil
	one := uneven == nil && (len(ranks) <= 1 || len(ranks[0]) == 1) // one node, or one rank on each
	switch {
	case how == "on" && one:
		return fmt.Sprintf(
			"direct all-to-alls: %s = \"on\" has no effect where a sequence has one node, or one rank on each node",
			key), nil
	case how == "off" || one:
		return "", nil
	case how == "on" && uneven != nil:
		return "", status.Errorf(status.Unsupported,
			"%s = \"on\": the nodes of a sequence have different numbers of ranks; start the same number on each node, or set it to \"auto\"",
			key)
	case how == "on" && !served:
		which := fmt.Sprintf("communicators of kind %q", m.Seq.Kind())
		if dry { // the plan is for GPUs, and its communicator has no name that a user knows
			which = "GPUs"
		}
		return "", status.Errorf(status.Unsupported,
			"%s = \"on\": %s have no two-level all-to-all; set it to \"auto\"", key, which)
	case uneven != nil || !served:
		return "", nil // there is no choice
	}
	nodes, perNode := len(ranks), len(ranks[0])
	direct, two := m.Links.AllToAllSeconds(nodes, perNode, bytes)
	text := fmt.Sprintf("by the model of the links, %.3g ms with two levels and %.3g ms direct for %d bytes a rank",
		1e3*two, 1e3*direct, bytes)
	if how == "auto" && two >= direct {
		return "direct all-to-alls: " + text, nil
	}
	if dry {
		model.ModelTwoLevels(nodes, perNode)
	} else {
		t, err := NewTwoLevel(m.Seq, m.Nodes)
		if err != nil {
			return "", err
		}
		c := m.Seq
		m.Seq = NewCounted(t, c.axis, c.ledger, c.clock, c.watch).spans(c.group.First, c.group.Stride)
		m.Seq.seq, m.Seq.messages = c.seq, c.messages // numbers continue
	}
	if how == "on" {
		text = key + " = \"on\""
	}
	return fmt.Sprintf("all-to-alls with two levels, over %d nodes of %d ranks: %s", nodes, perNode, text), nil
}

// TwoLevel returns the two levels of the sequence axis, nil if its all-to-alls are direct.
func (m *Mesh) TwoLevel() *TwoLevel {
	t, _ := m.Seq.inner.(*TwoLevel)
	return t
}
