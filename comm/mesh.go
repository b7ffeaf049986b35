package comm

import (
	"fmt"

	"ulysses/internal/clock"
	"ulysses/internal/status"
)

// Mesh arranges the ranks of the world as data × sequence: rank = replica·P + sequence rank, with
// P = ulysses·ring. The ranks of one sequence send the most bytes to each other. They have
// consecutive world ranks, so launchers usually place them on one node. DivideExperts adds two axes
// over the same ranks.
type Mesh struct {
	World    *Counted // axis "world": all ranks
	Seq      *Counted // axis "sequence": the P ranks that share one sequence
	Data     *Counted // axis "data": the ranks that have the same shard of different sequences
	Ulysses  int      // ranks over which attention is sharded by heads
	Ring     int      // groups of such ranks, over which attention is sharded by rows
	Replica  int      // of this rank; its rank in Data
	Replicas int      // size of Data
	// After DivideExperts: axis "expert", the ranks among which the experts of a layer are divided,
	// and axis "expert data", the ranks that have the same experts. Otherwise nil.
	Expert, ExpertData *Counted
	// For SetLevels: the node of each rank of Seq (nil = all are on one), and the links of a rank.
	Nodes []int
	Links Links
}

// NewMesh splits the world into its axes. With ulysses = 0, all ranks form one sequence axis
// (ulysses = size / ring). The ledger, clock and watch may be nil. Collective over world; Close the
// mesh to close its communicators and world.
func NewMesh(world Comm, ulysses, ring int, l *Ledger, clk *clock.Clock, w *Watch) (*Mesh, error) {
	n := world.Size()
	if ring == 0 {
		ring = 1
	}
	if ulysses < 0 || ring < 0 {
		return nil, status.Errorf(status.InvalidConfig,
			"comm.NewMesh: parallel.ulysses = %d, parallel.ring = %d; set both to 0 or more", ulysses, ring)
	}
	if ulysses == 0 {
		ulysses = n / ring
	}
	p := ulysses * ring
	if p == 0 || n%p != 0 {
		return nil, status.Errorf(status.InvalidConfig,
			"comm.NewMesh: %d ranks are not a multiple of parallel.ulysses * parallel.ring = %d * %d; set parallel.ulysses to %s, or start a multiple of %d ranks",
			n, ulysses, ring, nearest(n, p), max(p, 1))
	}
	m := &Mesh{World: NewCounted(world, "world", l, clk, w), Ulysses: ulysses, Ring: ring, Replica: world.Rank() / p,
		Replicas: n / p}
	seq, err := SplitPriority(m.World, m.Replica, world.Rank())
	if err != nil {
		return nil, err
	}
	data, err := m.World.Split(world.Rank()%p, world.Rank())
	if err != nil {
		return nil, err
	}
	m.Seq = NewCounted(seq, "sequence", l, clk, w).spans(m.Replica*p, 1)
	m.Data = NewCounted(data, "data", l, clk, w).spans(world.Rank()%p, p)
	return m, nil
}

// DivideExperts makes the axes of experts: groups of n consecutive ranks of the world, which have
// ranks of one sequence or of several. n = 0 and 1 leave all experts on every rank. The ledger,
// clock and watch may be nil. Collective over the world.
func (m *Mesh) DivideExperts(n int, l *Ledger, clk *clock.Clock, w *Watch) error {
	if n == 0 || n == 1 {
		return nil
	}
	rank, size := m.World.Rank(), m.World.Size()
	if n < 0 || size%n != 0 {
		return status.Errorf(status.InvalidConfig,
			"comm.DivideExperts: %d ranks are not a multiple of parallel.experts = %d; set parallel.experts to %s, or start a multiple of %d ranks",
			size, n, nearest(size, n), max(n, 1))
	}
	group, err := m.World.Split(rank/n, rank)
	if err != nil {
		return err
	}
	same, err := m.World.Split(rank%n, rank)
	if err != nil {
		return err
	}
	m.Expert = NewCounted(group, "expert", l, clk, w).spans(rank/n*n, 1)
	m.ExpertData = NewCounted(same, "expert data", l, clk, w).spans(rank%n, n)
	return nil
}

// ExpertRanks returns axis expert; nil if the experts are not divided.
func (m *Mesh) ExpertRanks() Comm {
	if m.Expert == nil {
		return nil
	}
	return m.Expert
}

// nearest returns the text of the divisors of n just below and just above p.
func nearest(n, p int) string {
	below, above := 0, 0
	for d := 1; d <= n; d++ {
		if n%d == 0 && d < p {
			below = d
		}
		if n%d == 0 && d > p && above == 0 {
			above = d
		}
	}
	switch {
	case above == 0:
		return fmt.Sprint(below)
	case below == 0:
		return fmt.Sprint(above)
	}
	return fmt.Sprintf("%d or %d", below, above)
}

// Close closes the communicators. Collective where their Close is.
func (m *Mesh) Close() error {
	var first error
	for _, c := range []*Counted{m.Expert, m.ExpertData, m.Seq, m.Data, m.World} {
		if c == nil {
			continue
		}
		if err := c.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}
