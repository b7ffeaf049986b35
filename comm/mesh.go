package comm

import (
	"fmt"

	"ulysses/internal/clock"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
)

// Mesh is the world as data × sequence: rank = replica·P + sequence rank, P = ulysses·ring, so that
// the ranks of one sequence, which exchange the most, are neighbours and share a node where they
// can.
type Mesh struct {
	World    *Counted // axis "world": all ranks
	Seq      *Counted // axis "sequence": the P ranks that hold one sequence
	Data     *Counted // axis "data": the ranks that hold the same part of different sequences
	Ulysses  int      // heads all-to-all degree
	Ring     int
	Replica  int // which sequence group this rank is in, its rank in Data
	Replicas int // how many there are
}

// NewMesh splits the world; all ranks call it. ulysses 0 is all the ranks that ring leaves. The
// ledger, clock and watch may be nil.
func NewMesh(world Comm, ulysses, ring int, l *Ledger, clk *clock.Clock, w *Watch) (*Mesh, error) {
	n := world.Size()
	if ring == 0 {
		ring = 1
	}
	if ulysses < 0 || ring < 0 {
		return nil, status.Errorf(status.InvalidConfig, "comm.NewMesh: parallel.ulysses = %d, parallel.ring = %d: set both to 0 or more", ulysses, ring)
	}
	if ring > 1 {
		return nil, status.Errorf(status.Unsupported, "comm.NewMesh: parallel.ring = %d: %s", ring, notbuilt.Ring.Text("set parallel.ring = 1"))
	}
	if ulysses == 0 {
		ulysses = n / ring
	}
	p := ulysses * ring
	if p == 0 || n%p != 0 {
		return nil, status.Errorf(status.InvalidConfig, "comm.NewMesh: %d ranks do not divide by parallel.ulysses * parallel.ring = %d * %d: set parallel.ulysses to %s, or start a multiple of %d ranks",
			n, ulysses, ring, nearest(n, p), max(p, 1))
	}
	m := &Mesh{World: NewCounted(world, "world", l, clk, w), Ulysses: ulysses, Ring: ring, Replica: world.Rank() / p, Replicas: n / p}
	seq, err := m.World.Split(m.Replica, world.Rank())
	if err != nil {
		return nil, err
	}
	data, err := m.World.Split(world.Rank()%p, world.Rank())
	if err != nil {
		return nil, err
	}
	m.Seq, m.Data = NewCounted(seq, "sequence", l, clk, w), NewCounted(data, "data", l, clk, w)
	return m, nil
}

// nearest names the divisors of n on either side of p.
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

// Close gives the three communicators up.
func (m *Mesh) Close() error {
	var first error
	for _, c := range []*Counted{m.Seq, m.Data, m.World} {
		if err := c.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}
