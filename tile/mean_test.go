package tile

import (
	"fmt"
	"testing"

	"ulysses/comm"
	"ulysses/tensor"
)

// Over ranks with unequal shards, one without rows and one without valid rows, mean and gradients
// are equal to the results of one rank.
func TestMeanOverRanks(t *testing.T) {
	cuts := []int64{0, 2, 6, 6, 19} // rank 1 has masked rows alone, rank 2 none
	one := newProblem(t, 2, 19, 0, 19, 0, 0)
	one.dout[1] = tensor.Tensor{} // a sum stays this rank's
	one.run(t)
	err := comm.RunLocal(4, func(c comm.Comm) error {
		lo, hi := cuts[c.Rank()], cuts[c.Rank()+1]
		p := newProblem(t, 2, 19, lo, hi, 4, 13)
		p.dout[1] = tensor.Tensor{}
		p.Ranks = c
		p.run(t)
		near(t, fmt.Sprintf("rank %d: mean", c.Rank()), p.Out[2].T, one.Out[2].T)
		near(t, fmt.Sprintf("rank %d: input gradient", c.Rank()), p.din[0], one.din[0].Slice(1, lo, hi))
		if err := c.AllReduce(nil, p.din[1], comm.Sum); err != nil {
			return err
		}
		near(t, fmt.Sprintf("rank %d: weight gradient", c.Rank()), p.din[1], one.din[1])
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Without valid rows the mean is 0, not NaN, and there is no gradient.
func TestMeanOfNothing(t *testing.T) {
	p := newProblem(t, 1, 9, 2, 6, 3, 0)
	p.dout[0], p.dout[1] = tensor.Tensor{}, tensor.Tensor{}
	p.run(t)
	if v := *at(p.Out[2].T, 0); v != 0 {
		t.Errorf("mean %v", v)
	}
	near(t, "weight gradient", p.din[1], zeros(5, 3))
}

// A second Forward gives the same result: sums and counts start at 0.
func TestForwardAgain(t *testing.T) {
	p := newProblem(t, 1, 9, 0, 9, 4, 0)
	p.run(t)
	sum, mean := *at(p.Out[1].T, 0), *at(p.Out[2].T, 0)
	if err := p.Forward(); err != nil {
		t.Fatal(err)
	}
	if *at(p.Out[1].T, 0) != sum || *at(p.Out[2].T, 0) != mean {
		t.Errorf("sum %v, then %v; mean %v, then %v", sum, *at(p.Out[1].T, 0), mean, *at(p.Out[2].T, 0))
	}
}
