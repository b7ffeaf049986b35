package tile

import (
	"math"
	"slices"
	"testing"

	"ulysses/tensor"
)

// Any tile size gives the result of one tile: tiled outputs and gradients are bitwise equal, sums
// are close. Outputs have another shape than the input, tensors are strided, and one of the inputs
// needs no gradient.
func TestAnyTile(t *testing.T) {
	for _, batch := range []int64{1, 2} {
		for _, rows := range []int64{1, 5, 125, 425} {
			one := newProblem(t, batch, rows, 0, rows, 0, 0)
			one.run(t)
			for _, n := range []int64{1, 2, 7, 32, 64, 213, 1000} {
				for _, more := range []int64{0, 300} { // rows that another rank has in addition
					p := newProblem(t, batch, rows, 0, rows, n, rows+more)
					p.run(t)
					if !slices.Equal(values(p.Out[0].T), values(one.Out[0].T)) ||
						!slices.Equal(values(p.din[0]), values(one.din[0])) {
						t.Fatalf("%d rows by %d: output or input gradient differs", rows, n)
					}
					near(t, "sum", p.Out[1].T, one.Out[1].T)
					near(t, "mean", p.Out[2].T, one.Out[2].T)
					near(t, "weight gradient", p.din[1], one.din[1])
				}
			}
		}
	}
}

// Forward and backward visit the same tiles, also empty ones if there are fewer rows than tiles.
func TestTilesOfBothHalves(t *testing.T) {
	p := newProblem(t, 1, 5, 0, 5, 2, 8)
	p.run(t)
	want := []string{"f0-2 0/4", "f2-4 1/4", "f4-5 2/4", "f5-5 3/4", "b0-2 0/4", "b2-4 1/4", "b4-5 2/4", "b5-5 3/4"}
	if !slices.Equal(p.layer.calls, want) {
		t.Errorf("tiles %q, want %q", p.layer.calls, want)
	}
	// 300 rows in tiles of two rows; another rank has 512 rows
	for _, x := range [][2]int64{{300, 512}, {0, 512}} {
		p = newProblem(t, 1, 512, 0, x[0], 2, x[1])
		p.run(t)
		if len(p.layer.calls) != 512 {
			t.Errorf("%d rows: %d calls for 256 tiles in two halves", x[0], len(p.layer.calls))
		}
	}
}

// The gradients are the slopes of Σ dout·y + dsum·sum + dmean·mean for every tile size: forward and
// backward weight the terms of a mean equally.
func TestSlopes(t *testing.T) {
	for _, n := range []int64{0, 3, 4} {
		value := func(change func(p *problem)) float64 {
			p := newProblem(t, 2, 11, 0, 11, n, 0)
			change(p)
			if err := p.Forward(); err != nil {
				t.Fatal(err)
			}
			v := float64(*at(p.Out[1].T, 0))*float64(*at(p.dout[1], 0)) +
				float64(*at(p.Out[2].T, 0))*float64(*at(p.dout[2], 0))
			y, d := values(p.Out[0].T), values(p.dout[0])
			for i := range y {
				v += float64(y[i]) * float64(d[i])
			}
			return v
		}
		p := newProblem(t, 2, 11, 0, 11, n, 0)
		p.run(t)
		for _, i := range []int64{0, 3, 6, 10} {
			const h = 1e-2
			slope := (value(func(p *problem) { *at(p.x, 1, i, 2) += h }) - value(func(p *problem) {
				*at(p.x, 1, i, 2) -= h
			})) / (2 * h)
			if got := float64(*at(p.din[0], 1, i, 2)); !(math.Abs(got-slope) <= 2e-3*(1+math.Abs(slope))) {
				t.Errorf("tile %d, x[1, %d, 2]: gradient %v, slope %v", n, i, got, slope)
			}
		}
		const h = 1e-2
		up, down := value(func(p *problem) { *at(p.w, 1, 1) += h }), value(func(p *problem) { *at(p.w, 1, 1) -= h })
		slope := (up - down) / (2 * h)
		if got := float64(*at(p.din[1], 1, 1)); !(math.Abs(got-slope) <= 1e-2*(1+math.Abs(slope))) {
			t.Errorf("tile %d, w[1, 1]: gradient %v, slope %v", n, got, slope)
		}
	}
}

// Gradients of outputs do not change, and a second Backward gives the same result.
func TestGradientsOfOutputsAreRead(t *testing.T) {
	p := newProblem(t, 1, 9, 0, 9, 4, 0)
	var before [][]float32
	for _, d := range p.dout {
		before = append(before, values(d))
	}
	p.run(t)
	first := values(p.din[0])
	p.layer.consumer = &consumer{}
	if err := p.Backward(p.dout, p.din); err != nil {
		t.Fatal(err)
	}
	for i, d := range p.dout {
		if !slices.Equal(values(d), before[i]) {
			t.Errorf("the gradient of output %d was changed", i)
		}
	}
	if !slices.Equal(values(p.din[0]), first) {
		t.Error("backward again gives another gradient")
	}
}

// A nil gradient of an output is zero. If all are nil, gradients are zero, and every tile is still
// visited and completed.
func TestNilIsZero(t *testing.T) {
	for missing := range 8 {
		want, got := newProblem(t, 1, 9, 0, 9, 4, 16), newProblem(t, 1, 9, 0, 9, 4, 16)
		for i := range 3 {
			if missing>>i&1 == 1 {
				want.dout[i] = zeros(want.dout[i].Dims()...)
				got.dout[i] = tensor.Tensor{}
			}
		}
		want.run(t)
		got.run(t)
		near(t, "input gradient", got.din[0], want.din[0])
		near(t, "weight gradient", got.din[1], want.din[1])
	}
}

// A layer without gradients of whole inputs is also completed.
func TestNothingWhole(t *testing.T) {
	p := newProblem(t, 1, 9, 0, 9, 4, 0)
	p.din[1] = tensor.Tensor{}
	p.run(t)
	p = newProblem(t, 1, 9, 0, 9, 4, 0)
	p.din[0] = tensor.Tensor{}
	p.run(t)
}
