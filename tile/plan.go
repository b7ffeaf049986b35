// Package tile computes functions of single rows in tiles of rows (Arctic Long Sequence Training,
// arXiv:2506.13996). The forward pass keeps nothing from inside a tile, and the backward pass
// computes it again. The memory for inner activations therefore depends on the size of a tile and
// not on the number of rows.
package tile

import (
	"strconv"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Plan cuts the rows of one rank into tiles: Count of them, of ⌈Rows/Count⌉ rows, the last ones
// shorter or empty. Count is a function of what all ranks know, so that tiles may be collective;
// how many rows a rank has itself does not change it.
type Plan struct {
	Rows  int64 // of this rank
	Count int64 // of tiles, the same on all ranks, at least 1
}

// Count is max(1, ⌈maxRows/tileRows⌉): maxRows are the most rows that a rank has, tileRows the most
// of a tile. 0 rows a tile is one tile.
func Count(maxRows, tileRows int64) int64 {
	if tileRows == 0 || maxRows == 0 {
		return 1
	}
	return (maxRows-1)/tileRows + 1 // the sum of ⌈⌉ would overflow for a tile as long as one likes
}

// NewPlan cuts rows for a rank, where the ranks know the most rows of one. maxRows 0 is this rank's
// rows.
func NewPlan(rows, tileRows, maxRows int64) (Plan, error) {
	if maxRows == 0 {
		maxRows = rows
	}
	if rows < 0 || tileRows < 0 || maxRows < rows {
		return Plan{}, status.Errorf(status.InvalidArgument,
			"tile.NewPlan: %d rows, %d in a tile, %d at most on a rank: give what is not negative, and the most of all ranks", rows, tileRows, maxRows)
	}
	return Plan{rows, Count(maxRows, tileRows)}, nil
}

// Agree is NewPlan for ranks that do not know each other's rows. It is collective; a fault of one
// rank is every rank's error.
func Agree(c comm.Comm, rows, tileRows int64) (Plan, error) {
	_, err := NewPlan(rows, tileRows, 0)
	if err = comm.Agree(c, err); err != nil {
		return Plan{}, err
	}
	if err := comm.Same(c, "tile.Agree", comm.Field{Name: "tile_rows", Value: strconv.FormatInt(tileRows, 10)}); err != nil {
		return Plan{}, err
	}
	most := []int64{rows}
	if err := c.AllReduce(nil, tensor.OfInt64(most, 1), comm.Max); err != nil {
		return Plan{}, err
	}
	return NewPlan(rows, tileRows, most[0])
}

// Bounds are the rows [lo, hi) of tile i.
func (p Plan) Bounds(i int64) (lo, hi int64) {
	n := p.Step()
	return min(i*n, p.Rows), min((i+1)*n, p.Rows)
}

// Step is the rows of the first tile, the longest: ⌈Rows/Count⌉.
func (p Plan) Step() int64 {
	if p.Rows == 0 {
		return 0
	}
	return (p.Rows-1)/p.Count + 1
}

// Room is rows enough for every tile of every plan of at most this many rows. Step is not: it may
// be longer for fewer rows.
func Room(rows, tileRows int64) int64 {
	if tileRows == 0 {
		return rows
	}
	return min(rows, tileRows)
}
