package dryrun

import (
	"fmt"
	"testing"

	"ulysses/internal/clock"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

// A communication costs a share of the work before it, and a slice for each further rank on the
// core.
func TestWaitCost(t *testing.T) {
	for _, c := range []struct{ work, share, want float64 }{{0, 1, 0}, {2, 1, 2 * waitShare}, {2, 0.5, 2 * waitShare},
		{0, 3, 2 * slice()}, {1, 2, waitShare + slice()}} {
		near.Value(t, fmt.Sprintf("%v s of work, %v ranks to a core", c.work, c.share), WaitCost(c.work, c.share),
			c.want, 1e-12)
	}
	if s := slice(); s < 0.7e-3 || s > 2.8e-3 {
		t.Errorf("a slice of %v s", s)
	}
}

// Communications are counted by phase. A group of one rank has none.
func TestWaitsAreCounted(t *testing.T) {
	c := clock.New()
	d := open(t, tensor.Host, slow, c)
	s, _ := d.NewStream()
	many, alone := NewMesh(d, 0, 4, 2, 1, 0, nil, c), NewMesh(d, 0, 1, 1, 1, 0, nil, c)
	c.Push("a")
	x := of(tensor.Host, 2)
	for _, err := range []error{many.World.Barrier(), many.Seq.AllToAll(s, x, x, []int64{1, 1}, []int64{1, 1}),
		alone.World.Barrier()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	spent := d.Spent()
	if spent.Waits["reduce"] != 1 || spent.Waits["exchange"] != 1 || len(spent.Waits) != 2 {
		t.Errorf("%+v", spent.Waits)
	}
	if twice := spent.Plus(spent, 1); twice.Waits["exchange"] != 2 || spent.Waits["exchange"] != 1 {
		t.Errorf("%+v, once %+v", twice.Waits, spent.Waits)
	}
}
