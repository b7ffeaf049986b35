package model

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/tile"
)

// Tiles says how many of this rank's rows the layers that are local to a token compute at a time:
// TileAuto, TileOff or a number. Losses do not depend on it, gradients of weights by no more than
// the order of their sums.
type Tiles struct {
	// MLP in tiles keeps nothing between the passes but its input: backward computes gate and up
	// again, a fifth more work. TileAuto is TileOff here; a trainer that knows what memory there is
	// decides.
	MLP int64
	// Loss: rows of logits. TileAuto takes as many as products are efficient with.
	Loss int64
}

const (
	TileAuto int64 = 0
	TileOff  int64 = -1 // all rows at once
)

// A tile takes about tileBytes inside, but has rows enough to keep the products efficient and no
// more than are of use to them. A tile reads the weights and adds to their gradients in F32: on a
// GPU that is all its time with some hundreds of rows.
func tileBytes(d device.Device) int64 {
	if d.Info().Place == tensor.Host {
		return 64 << 20
	}
	return 1 << 30
}

// SetTiles is for between passes; Memory goes by it.
func (m *Model) SetTiles(t Tiles) error {
	if t.MLP < TileOff || t.Loss < TileOff {
		return status.Errorf(status.InvalidArgument, "model.SetTiles: %d rows of the MLP, %d of the loss: give 1 or more, TileAuto or TileOff", t.MLP, t.Loss)
	}
	m.tiles = t
	return nil
}

// Tiles are the tiles as they were set.
func (m *Model) Tiles() Tiles { return m.tiles }

// MLPTile is the rows of the MLP that a tile takes well.
func (m *Model) MLPTile() int64 {
	return max(256, min(4096, tileBytes(m.dev)/(3*m.compute.Size()*m.Config.IntermediateSize)))
}

// tilePlan cuts this rank's rows; all ranks have as many tiles. 0 rows a tile is one tile.
func (p *pass) tilePlan(tileRows int64) tile.Plan {
	plan, err := tile.NewPlan(p.rows, tileRows, p.mostRows())
	if p.err == nil {
		p.err = err
	}
	return plan
}

// mostRows is the most rows that a rank has.
func (p *pass) mostRows() int64 {
	if p.dry {
		return p.rows
	}
	most := int64(0)
	for r := range p.batch.SP.Size() {
		lo, hi := p.batch.SP.RankRows(r)
		most = max(most, hi-lo)
	}
	return most
}

// tiled runs one half of a tiled computation: backward, to these gradients, when they are given.
func (p *pass) tiled(c *tile.Compute, dout, din []tensor.Tensor) {
	if p.skip() {
		return
	}
	c.Device, c.Stream = p.dev, p.c.Stream
	if din == nil {
		p.err = c.Forward()
	} else {
		p.err = c.Backward(dout, din)
	}
}
