package tile

import (
	"fmt"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// kind says how tiles use a tensor.
type kind uint8

const (
	tiled kind = iota
	whole
	sum
	mean
)

var kindNames = [...]string{"tiled", "whole", "a sum", "a mean"}

// Operand is a tensor of a computation.
type Operand struct {
	T    tensor.Tensor
	kind kind
	dim  int
}

// Tiled returns an operand of which each tile has its rows along an axis. The rows of an output are
// concatenated. The axis has the plan's number of rows; other axes and all strides are arbitrary.
func Tiled(t tensor.Tensor, axis int) Operand { return Operand{t, tiled, axis} }

// Whole returns an input that each tile reads completely, such as a weight. Tiles add to its
// gradient.
func Whole(t tensor.Tensor) Operand { return Operand{T: t, kind: whole} }

// Sum returns an output that is set to zero before the first tile and to which tiles add.
func Sum(t tensor.Tensor) Operand { return Operand{T: t, kind: sum} }

// Mean returns a dense F32 output that is set to zero. Tiles add a sum to it, and the number of its
// terms to Tile.Valid. After the last tile it is divided by the total number of terms (of all
// ranks, with Compute.Ranks); 0 terms give 0. Therefore the result does not depend on the size of
// tiles or on the positions of ignored labels.
func Mean(t tensor.Tensor) Operand { return Operand{T: t, kind: mean} }

// view returns the rows [lo, hi) of x, which has the operand's shape, for example its gradient.
func (o *Operand) view(x tensor.Tensor, lo, hi int64) tensor.Tensor {
	if o.kind != tiled || x.IsNil() {
		return x
	}
	return x.Slice(o.dim, lo, hi)
}

// check returns an error if the operand does not fit the plan, or has a kind that is not allowed.
func (o *Operand) check(name string, i int, rows int64, allowed ...kind) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "tile.Compute: %s %d, %v: %s", name, i, o.T,
			fmt.Sprintf(format, args...))
	}
	fits := false
	for _, k := range allowed {
		fits = fits || o.kind == k
	}
	switch {
	case !fits:
		return bad("it is %s; an input must be Tiled or Whole, an output Tiled, Sum or Mean", kindNames[o.kind])
	case o.T.IsNil():
		return bad("it is absent; omit it from the list")
	case o.kind == tiled && (o.dim < 0 || o.dim >= int(o.T.NDim)):
		return bad("it has no axis %d; give an axis of the tensor", o.dim)
	case o.kind == tiled && o.T.Shape[o.dim] != rows:
		return bad("axis %d has %d rows, the plan has %d; make the plan for the rows of the tensor", o.dim,
			o.T.Shape[o.dim], rows)
	case o.kind == mean && (o.T.DType != tensor.F32 || !o.T.Contiguous()):
		return bad("a mean must be dense F32")
	}
	return nil
}

// like returns an error if a gradient does not have the shape of its operand; nil has no shape.
func (o *Operand) like(name string, i int, g tensor.Tensor) error {
	if g.IsNil() || g.NDim == o.T.NDim && g.Shape == o.T.Shape {
		return nil
	}
	return status.Errorf(status.InvalidArgument,
		"tile.Compute: the gradient of %s %d is %v; give the shape of %v, or nil", name, i, g, o.T)
}
