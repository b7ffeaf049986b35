package tile

import (
	"fmt"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// kind says how a tensor meets the tiles.
type kind uint8

const (
	cut kind = iota
	whole
	sum
	mean
)

var kindNames = [...]string{"cut", "whole", "a sum", "a mean"}

// Operand is a tensor of a computation.
type Operand struct {
	T    tensor.Tensor
	kind kind
	dim  int
}

// Cut is a tensor of which a tile sees its rows of an axis; the rows of an output are concatenated
// along it. The extent of the axis is the plan's rows; the other axes are free, and so are strides.
func Cut(t tensor.Tensor, axis int) Operand { return Operand{t, cut, axis} }

// Whole is an input that every tile sees whole, such as a weight. Tiles add to its gradient.
func Whole(t tensor.Tensor) Operand { return Operand{T: t, kind: whole} }

// Sum is an output that is zeroed before the first tile and that tiles add to.
func Sum(t tensor.Tensor) Operand { return Operand{T: t, kind: sum} }

// Mean is a dense F32 output that is zeroed, to which tiles add a sum, and to Tile.Valid how many
// terms it has. After the last tile it is divided by the count of all tiles (of all ranks', with
// Compute.Ranks); nothing over nothing is 0. So it does not matter how long tiles are, nor where
// ignored labels lie.
func Mean(t tensor.Tensor) Operand { return Operand{T: t, kind: mean} }

// view is what a tile of rows [lo, hi) sees of x, which has the operand's shape, such as its
// gradient.
func (o *Operand) view(x tensor.Tensor, lo, hi int64) tensor.Tensor {
	if o.kind != cut || x.IsNil() {
		return x
	}
	return x.Slice(o.dim, lo, hi)
}

// check refuses what cannot be cut, or what an output or input cannot be.
func (o *Operand) check(name string, i int, rows int64, allowed ...kind) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "tile.Compute: %s %d, %v: %s", name, i, o.T, fmt.Sprintf(format, args...))
	}
	fits := false
	for _, k := range allowed {
		fits = fits || o.kind == k
	}
	switch {
	case !fits:
		return bad("it is %s: an input is cut or whole, an output is cut, a sum or a mean", kindNames[o.kind])
	case o.T.IsNil():
		return bad("there is none: leave it out of the list")
	case o.kind == cut && (o.dim < 0 || o.dim >= int(o.T.NDim)):
		return bad("it is cut along axis %d: give one that it has", o.dim)
	case o.kind == cut && o.T.Shape[o.dim] != rows:
		return bad("axis %d has %d rows and the plan %d: plan as many", o.dim, o.T.Shape[o.dim], rows)
	case o.kind == mean && (o.T.DType != tensor.F32 || !o.T.Contiguous()):
		return bad("a mean is dense F32")
	}
	return nil
}

// like refuses a gradient of another shape than its operand's; nil is none.
func (o *Operand) like(name string, i int, g tensor.Tensor) error {
	if g.IsNil() || g.NDim == o.T.NDim && g.Shape == o.T.Shape {
		return nil
	}
	return status.Errorf(status.InvalidArgument, "tile.Compute: the gradient of %s %d is %v: give the shape of %v, or none", name, i, g, o.T)
}
