// Package tile computes row-wise functions in tiles of rows (Arctic Long Sequence Training,
// arXiv:2506.13996). The forward pass saves nothing from inside a tile, and the backward pass
// recomputes it. Therefore the memory for inner activations depends on the size of a tile and not
// on the number of rows.
//
// NewPlan or Agree divides the rows into tiles. A Compute has the operands (Tiled, Whole, Sum,
// Mean) and a Body, which computes one tile. Forward and Backward run the body for all tiles.
package tile

import (
	"strconv"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Plan divides the rows of one rank into Count tiles of ⌈Rows/Count⌉ rows; the last tiles may be
// shorter or empty. Count is equal on all ranks, so that a body may be collective, and does not
// depend on this rank's rows.
type Plan struct {
	Rows  int64 // of this rank
	Count int64 // number of tiles, equal on all ranks, at least 1
}

// Count returns the number of tiles, max(1, ⌈maxRows/tileRows⌉). maxRows is the maximum of the rows
// of all ranks, tileRows the maximum of a tile. tileRows = 0 means one tile.
func Count(maxRows, tileRows int64) int64 {
	if tileRows == 0 || maxRows == 0 {
		return 1
	}
	return (maxRows-1)/tileRows + 1 // maxRows + tileRows - 1 could overflow
}

// NewPlan makes the plan of a rank. maxRows is the maximum of the rows of all ranks; 0 means that
// it is rows. Not collective.
func NewPlan(rows, tileRows, maxRows int64) (Plan, error) {
	if maxRows == 0 {
		maxRows = rows
	}
	if rows < 0 || tileRows < 0 || maxRows < rows {
		return Plan{}, status.Errorf(status.InvalidArgument,
			"tile.NewPlan: rows = %d, tile_rows = %d, max_rows = %d; none may be negative, and max_rows is the maximum of rows over all ranks",
			rows, tileRows, maxRows)
	}
	return Plan{rows, Count(maxRows, tileRows)}, nil
}

// Agree is NewPlan for ranks that do not know the rows of other ranks. An error of one rank is
// returned on all ranks. Collective over c.
func Agree(c comm.Comm, rows, tileRows int64) (Plan, error) {
	_, err := NewPlan(rows, tileRows, 0)
	if err = comm.Agree(c, err); err != nil {
		return Plan{}, err
	}
	if err := comm.Same(c, "tile.Agree",
		comm.Field{Name: "tile_rows", Value: strconv.FormatInt(tileRows, 10)}); err != nil {
		return Plan{}, err
	}
	most := []int64{rows}
	if err := c.AllReduce(nil, tensor.OfInt64(most, 1), comm.Max); err != nil {
		return Plan{}, err
	}
	return NewPlan(rows, tileRows, most[0])
}

// Bounds returns the rows [lo, hi) of tile i.
func (p Plan) Bounds(i int64) (lo, hi int64) {
	n := p.Step()
	return min(i*n, p.Rows), min((i+1)*n, p.Rows)
}

// Step returns the rows of the first tile, which is the longest: ⌈Rows/Count⌉.
func (p Plan) Step() int64 {
	if p.Rows == 0 {
		return 0
	}
	return (p.Rows-1)/p.Count + 1
}

// MaxTileRows returns the maximum rows of a tile in all plans of at most this many rows. Step of
// the longest plan is not enough: it may be larger for fewer rows.
func MaxTileRows(rows, tileRows int64) int64 {
	if tileRows == 0 {
		return rows
	}
	return min(rows, tileRows)
}
