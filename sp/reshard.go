package sp

import (
	"slices"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// reshardTensor is one tensor of an all-to-all, in both of its layouts.
type reshardTensor struct {
	seq   tensor.Tensor // [B, n, H, D]: this rank's rows of all heads
	heads tensor.Tensor // [h, B, S, D]: all rows of this rank's group of a ring, of this rank's heads
	split []span        // heads of each rank
	rows  *exchange     // rows exchanged with each rank
	// for heads that several ranks have: the heads of split that no lower rank has; nil = all
	first []span

	// cos and sin are [B·n, R/2]: features are rotated from seq to heads, and back from heads to
	// seq; nil = no rotation
	cos, sin tensor.Tensor
	norm     HeadNorm // applied from seq to heads, before the rotation
}

// seqBlock returns some of this rank's rows of the given heads, head-major: [heads, B, n, D].
func (t *reshardTensor) seqBlock(heads, rows span) tensor.Tensor {
	return t.seq.Slice(2, heads.lo, heads.hi).Slice(1, rows.lo, rows.hi).Permute(2, 0, 1, 3)
}

// headsBlock returns some rows of this rank's heads: [h, B, n, D].
func (t *reshardTensor) headsBlock(rows span) tensor.Tensor {
	return t.heads.Slice(2, rows.lo, rows.hi)
}

// elementsWith returns the elements that this rank sends to rank j from tokens to heads, and those
// that it receives from rank j. In the other direction, the two are exchanged.
func (p *Plan) elementsWith(tensors []reshardTensor, j int64) (send, recv int64) {
	if j == p.rank {
		return 0, 0
	}
	for i := range tensors {
		t := &tensors[i]
		row := t.seq.Shape[0] * t.seq.Shape[3] // elements of a head
		send += t.split[j].n() * t.rows.seqRows[j] * row
		recv += t.split[p.rank].n() * t.rows.headsRows[j] * row
	}
	return send, recv
}

// wireElements returns the elements that an all-to-all from tokens to heads sends and receives on
// this rank.
func (p *Plan) wireElements(tensors []reshardTensor) (send, recv int64) {
	for j := range p.size {
		s, r := p.elementsWith(tensors, j)
		send, recv = send+s, recv+r
	}
	return send, recv
}

// count sets p.send and p.recv for one all-to-all and returns their sums.
func (p *Plan) count(tensors []reshardTensor, toHeads bool) (sent, received int64) {
	for j := range p.size {
		send, recv := p.elementsWith(tensors, j)
		if !toHeads {
			send, recv = recv, send
		}
		p.send[j], p.recv[j] = send, recv
		sent, received = sent+send, received+recv
	}
	return sent, received
}

// A block in the buffer of an all-to-all ("wire") has the layout of the local tensors: [h, B, n, D]
// in memory, so that unpacking it into [h, B, S, D] copies h·B runs of n·D elements. With tokens
// first it is [B, n, h, D], which unpacks into B runs. The blocks of all tensors for one rank are
// contiguous. A rank's block for itself is not in the buffer.

// seqToHeads fills the heads of the tensors from their seq with one all-to-all. Collective.
func (p *Plan) seqToHeads(s device.Stream, wire tensor.Tensor, tensors []reshardTensor) error {
	return p.reshard(s, wire, tensors, true)
}

// headsToSeq fills the seq of the tensors from their heads with one all-to-all. It is the inverse
// of seqToHeads. If first is set it is the adjoint, and adds the copies of a head in rank order.
// Collective.
func (p *Plan) headsToSeq(s device.Stream, wire tensor.Tensor, tensors []reshardTensor) error {
	return p.reshard(s, wire, tensors, false)
}

func (p *Plan) reshard(s device.Stream, wire tensor.Tensor, tensors []reshardTensor, toHeads bool) error {
	sent, received := p.count(tensors, toHeads)
	if err := p.pack(s, wire, tensors, toHeads); err != nil {
		return err
	}
	if p.size > 1 {
		src, dst := onWire(wire, tensors[0].seq.DType, sent, received)
		if err := p.comm.AllToAll(s, dst, src, p.recv, p.send); err != nil {
			return err
		}
	}
	return p.unpack(s, wire, sent, tensors, toHeads)
}

// onWire returns the elements to send, at the front of the wire, and those to receive, behind them.
func onWire(wire tensor.Tensor, dtype tensor.DType, sent, received int64) (src, dst tensor.Tensor) {
	return wire.At(0, dtype, sent), wire.At(sent*dtype.Size(), dtype, received)
}

// pack copies the blocks to send to the front of the wire.
func (p *Plan) pack(s device.Stream, wire tensor.Tensor, tensors []reshardTensor, toHeads bool) error {
	return device.Grouped(s, func() error { return p.walk(s, wire, 0, tensors, toHeads, true) })
}

// unpack copies the received blocks, which start at element at of the wire.
func (p *Plan) unpack(s device.Stream, wire tensor.Tensor, at int64, tensors []reshardTensor, toHeads bool) error {
	err := device.Grouped(s, func() error { return p.walk(s, wire, at, tensors, toHeads, false) })
	if err != nil || toHeads {
		return err
	}
	for i := range tensors {
		// after the copies of a head are added
		if t := &tensors[i]; t.first != nil && !t.cos.IsNil() {
			rows := span{0, t.seq.Shape[1]}
			all := t.seqBlock(span{0, t.seq.Shape[2]}, rows)
			if err := p.rotate(s, t, all, span{}, rows, all, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// walk packs or unpacks the blocks of the wire in rank order, from element at on. Its copies and
// rotations are independent of each other. If pack equals
// toHeads, a block has rows of this rank's tokens and another rank's heads; otherwise it has rows
// of another rank's tokens and this rank's heads. In the first case walk also copies the rows that
// stay on this rank.
func (p *Plan) walk(s device.Stream, wire tensor.Tensor, at int64, tensors []reshardTensor, toHeads, pack bool) error {
	ofSeq := toHeads == pack
	for j := range p.size {
		if j == p.rank && !ofSeq {
			continue
		}
		for i := range tensors {
			t := &tensors[i]
			heads, ranges, n := t.split[p.rank], t.rows.heads[j], t.rows.headsRows[j]
			if ofSeq {
				heads, ranges, n = t.split[j], t.rows.seq[j], t.rows.seqRows[j]
			}
			var block tensor.Tensor
			if j != p.rank {
				block, at = p.nextBlock(wire, at, t, heads.n(), n)
			}
			row := int64(0)
			for k, r := range ranges {
				part := block
				if j == p.rank {
					part = t.headsBlock(t.rows.heads[j][k])
				} else if len(ranges) > 1 {
					part = block.Slice(2, row, row+r.n())
				}
				row += r.n()
				var err error
				switch {
				case ofSeq && pack:
					err = p.rotate(s, t, part, heads, r, t.seqBlock(heads, r), false)
				case ofSeq:
					err = p.merge(s, t, j, r, part)
				case pack:
					err = p.copy(s, part, t.headsBlock(r))
				default:
					err = p.copy(s, t.headsBlock(r), part)
				}
				if err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// merge writes some rows of rank j's heads into t, and adds a head if a lower rank has a copy.
// src is [h_j, B, n, D].
func (p *Plan) merge(s device.Stream, t *reshardTensor, j int64, rows span, src tensor.Tensor) error {
	heads := t.split[j]
	if t.first == nil {
		return p.rotate(s, t, t.seqBlock(heads, rows), heads, rows, src, true)
	}
	if heads == t.first[j] {
		return p.copy(s, t.seqBlock(heads, rows), src)
	}
	shared := t.first[j].lo - heads.lo
	if sum := t.seqBlock(span{heads.lo, t.first[j].lo}, rows); sum.Numel() > 0 {
		if err := p.dev.Add(s, sum, sum, src.Slice(0, 0, shared)); err != nil {
			return err
		}
	}
	return p.copy(s, t.seqBlock(t.first[j], rows), src.Slice(0, shared, heads.n()))
}

// nextBlock returns the block [h, B, n, D] at an element offset of the wire, and the offset of its
// end.
func (p *Plan) nextBlock(wire tensor.Tensor, at int64, t *reshardTensor, heads, rows int64) (tensor.Tensor, int64) {
	c := device.Allocator{Mem: wire, Align: 1, Used: at * t.seq.DType.Size()}
	block := p.alloc(&c, t.seq.DType, heads, t.seq.Shape[0], rows, t.seq.Shape[3])
	return block, at + block.Numel()
}

func (p *Plan) copy(s device.Stream, dst, src tensor.Tensor) error {
	if src.Numel() == 0 {
		return nil
	}
	return p.dev.Copy(s, dst, src)
}

// rotate copies heads, with the norm and the rotation of t if it has them. dst and src are
// [h, B, n, D], with some of this rank's rows.
func (p *Plan) rotate(s device.Stream, t *reshardTensor, dst tensor.Tensor, heads, rows span, src tensor.Tensor,
	inverse bool) error {
	if t.cos.IsNil() {
		return p.copy(s, dst, src)
	}
	n := t.seq.Shape[1]
	for b := range src.Shape[1] {
		x, y := src.Select(1, b).Permute(1, 0, 2), dst.Select(1, b).Permute(1, 0, 2) // [n, h, D]
		if x.Numel() == 0 {
			continue
		}
		lo, hi := b*n+rows.lo, b*n+rows.hi
		p.rope = device.Rope{X: x, Y: y, Cos: t.cos.Slice(0, lo, hi), Sin: t.sin.Slice(0, lo, hi), Inverse: inverse}
		if w := t.norm.W; !w.IsNil() && !inverse {
			p.rope.W, p.rope.Eps, p.rope.Centre = w, t.norm.Eps, t.norm.Centre
			p.rope.RStd = t.norm.RStd.Slice(0, lo, hi).Slice(1, heads.lo, heads.hi)
		}
		if err := p.dev.Rope(s, &p.rope); err != nil {
			return err
		}
	}
	return nil
}

// Reshard has n tensors that change their sharding in one all-to-all.
type Reshard struct {
	// Seq are [B, rows, H, ·] with this rank's rows of all heads. Heads are [B, S, h, ·] with all
	// rows of this rank's heads (Plan.Heads); with a ring, the rows of this rank's group
	// (Batch.GroupRows). The last axis is dense. All have one type.
	Seq, Heads []tensor.Tensor
	// Shared marks tensors with the heads and rows of keys; nil = none.
	Shared []bool
	// SumCopies makes HeadsToSeq add the copies of heads that several ranks have, in rank order.
	// That is the adjoint of SeqToHeads. Without it, HeadsToSeq uses the lowest rank's copy, which
	// is the inverse. The type must be F32 or another type in which the device computes; such sums
	// are rounded after each addition.
	SumCopies bool
	Workspace tensor.Tensor // U8, ReshardWorkspace bytes, aligned to Info.Align
}

// SeqToHeads writes r.Heads from r.Seq. HeadsToSeq writes r.Seq from r.Heads. Each is the inverse
// of the other, and with SumCopies its adjoint. Collective over the plan's communicator.
func (p *Plan) SeqToHeads(s device.Stream, b *Batch, r *Reshard) error {
	tensors, err := p.checkReshard("sp.SeqToHeads", b, r, false)
	if err = p.Admit.Result(err); err != nil || len(tensors) == 0 {
		return err
	}
	return p.seqToHeads(s, bytesOf(r.Workspace), tensors)
}

// HeadsToSeq is described at SeqToHeads.
func (p *Plan) HeadsToSeq(s device.Stream, b *Batch, r *Reshard) error {
	tensors, err := p.checkReshard("sp.HeadsToSeq", b, r, true)
	if err = p.Admit.Result(err); err != nil || len(tensors) == 0 {
		return err
	}
	return p.headsToSeq(s, bytesOf(r.Workspace), tensors)
}

// bytesOf returns t, or an empty tensor if t is absent.
func bytesOf(t tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		return tensor.Of(nil, tensor.U8, 0)
	}
	return t
}

// ReshardWorkspace returns the bytes of workspace for either direction. Only the shapes and types
// of the tensors are used. Not collective.
func (p *Plan) ReshardWorkspace(b *Batch, r *Reshard) (int64, error) {
	sketch := *r
	sketch.Workspace = tensor.Tensor{}
	tensors, err := p.pairTensors("sp.ReshardWorkspace", b, &sketch, false)
	if err != nil || len(tensors) == 0 {
		return 0, err
	}
	send, recv := p.wireElements(tensors)
	return (send + recv) * tensors[0].seq.DType.Size(), nil
}

// checkReshard returns the tensors of a reshard after checking them and the workspace.
func (p *Plan) checkReshard(op string, b *Batch, r *Reshard, back bool) ([]reshardTensor, error) {
	tensors, err := p.pairTensors(op, b, r, back)
	if err != nil || len(tensors) == 0 {
		return nil, err
	}
	send, recv := p.wireElements(tensors)
	need := (send + recv) * tensors[0].seq.DType.Size()
	return tensors, CheckBytes(op, "workspace", r.Workspace, need)
}

// pairTensors checks the tensors of a reshard and pairs each seq with its heads.
func (p *Plan) pairTensors(op string, b *Batch, r *Reshard, back bool) ([]reshardTensor, error) {
	if err := p.checkBatch(op, b); err != nil {
		return nil, err
	}
	if len(r.Seq) != len(r.Heads) || (r.Shared != nil && len(r.Shared) != len(r.Seq)) {
		return nil, status.Errorf(status.InvalidArgument,
			"%s: %d seq tensors, %d heads tensors, %d shared flags; give the same number of each",
			op, len(r.Seq), len(r.Heads), len(r.Shared))
	}
	tensors := p.tensors[:0] // allocates only in the first call
	for i := range r.Seq {
		t := reshardTensor{seq: r.Seq[i], split: p.query, rows: b.queries.inOrder.exchange}
		h, all, n := p.layer.Heads, b.GroupRows(), b.Rows()
		shared := r.Shared != nil && r.Shared[i]
		if shared {
			t.split, t.rows, h, all, n = p.key, b.keys.inOrder.exchange, p.layer.KVHeads, b.GroupKVRows(), b.KVRows()
		}
		summed := p.dev.Info().Compute
		if t.seq.DType != r.Seq[0].DType || r.Heads[i].DType != r.Seq[0].DType ||
			(r.SumCopies && !slices.Contains(summed, t.seq.DType)) {
			return nil, status.Errorf(status.InvalidArgument,
				"%s: tensor %d: %v and %v; give all tensors one type, one of %v with SumCopies",
				op, i, t.seq, r.Heads[i], summed)
		}
		d := t.seq.Shape[3]
		if err := checkTensor(op, "seq", t.seq, t.seq.DType, b.spec.Batch, n, h, d); err != nil {
			return nil, err
		}
		if err := checkTensor(op, "heads", r.Heads[i], t.seq.DType, b.spec.Batch, all, t.split[p.rank].n(),
			d); err != nil {
			return nil, err
		}
		t.heads = r.Heads[i].Permute(2, 0, 1, 3)
		switch {
		case shared && back && r.SumCopies:
			t.first = p.owned
		case shared && back: // only the lowest rank with the head sends it
			t.heads = t.heads.Slice(0, p.owned[p.rank].lo-p.key[p.rank].lo, p.key[p.rank].n())
			t.split = p.owned
		}
		tensors = append(tensors, t)
	}
	p.tensors = tensors
	return tensors, nil
}
