package model

import (
	"math"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/tile"
)

// Tiles are the numbers of tokens that the layers that are local to a token compute at a time:
// TileAuto, TileOff or a number. Losses do not depend on tiles. Gradients of weights differ only in
// the order of their sums.
type Tiles struct {
	// MLP: in tiles, gate and up are not saved, and the backward half recomputes them, a fifth more
	// work. TileAuto is TileOff; the trainer, which knows the memory, chooses a number.
	MLP int64
	// Loss: TileAuto is the number of tokens for which matrix products are efficient.
	Loss int64
	// GDN: the gated delta rule on a GPU has intermediate results of so many tokens at a time, at
	// least two chunks. TileAuto is the device's choice. It may divide a sequence in other places,
	// and then losses are equal up to rounding. The CPU does not use it.
	GDN int64
}

const (
	TileAuto int64 = 0
	TileOff  int64 = -1 // all tokens at once
)

// tileBytes returns the memory of the intermediate tensors of a tile, within limits on the tokens:
// a tile reads the weights and adds to their gradients in F32. On a GPU, that is all its time with
// a few hundred tokens.
func tileBytes(d device.Device) int64 {
	if d.Info().Place == tensor.Host {
		return 64 << 20
	}
	return 1 << 30
}

// SetTiles sets the tiles of the following passes and of Memory.
func (m *Model) SetTiles(t Tiles) error {
	if min(t.MLP, t.Loss, t.GDN) < TileOff {
		return status.Errorf(status.InvalidArgument,
			"model.SetTiles: tiles of %d tokens for the MLP, %d for the loss, %d for the gated delta rule; set 1 or more, TileAuto or TileOff",
			t.MLP, t.Loss, t.GDN)
	}
	m.tiles = t
	if l := m.plans.linear; l != nil {
		panel := t.GDN
		if panel == TileOff {
			panel = math.MaxInt64
		}
		l.SetPanel(panel)
	}
	return nil
}

// Tiles returns the tiles.
func (m *Model) Tiles() Tiles { return m.tiles }

// MLPTile returns the number of tokens of a tile for which the MLP is efficient.
func (m *Model) MLPTile() int64 {
	// an MLP has gate, up and the input of down; experts have them and their input for each choice
	each := 3 * m.Config.IntermediateSize
	if e := &m.Config.Experts; m.Config.SparseLayers() > 0 {
		each = max(each, e.PerToken*(3*e.Size+m.Config.HiddenSize)+3*e.Shared)
		if m.expertRanks != nil { // the rows of all ranks may arrive at one
			each *= int64(m.expertRanks.Size())
		}
	}
	return max(256, min(4096, tileBytes(m.dev)/(m.compute.Size()*each)))
}

// tilePlan returns the tiles of this rank's tokens, the same number on all ranks of which one has
// most tokens. With tileTokens 0, there is one tile.
func (p *pass) tilePlan(tileTokens, most int64) tile.Plan {
	plan, err := tile.NewPlan(p.tokens, tileTokens, most)
	if p.err == nil {
		p.err = err
	}
	return plan
}

// maxTokens returns the largest number of tokens of a rank.
func (p *pass) maxTokens() int64 {
	if p.dry {
		return p.tokens
	}
	return p.batch.SP.MostRows()
}

// tiled runs a tiled computation: forward, or if gradients are given backward.
func (p *pass) tiled(c *tile.Compute, dout, din []tensor.Tensor) {
	if p.skip() {
		return
	}
	c.Device, c.Stream = p.dev, p.ctx.Stream
	if din == nil {
		p.err = c.Forward()
	} else {
		p.err = c.Backward(dout, din)
	}
}
