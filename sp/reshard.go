package sp

import (
	"slices"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// part is one tensor of an exchange, in both of its layouts.
type part struct {
	seq   tensor.Tensor // [B, n, H, D]: this rank's rows of all heads
	heads tensor.Tensor // [h, B, S, D]: all rows of this rank's heads
	split []span        // heads of each rank
	rows  []span        // rows of each rank
	// for heads held by several ranks: those of split that no lower rank has; nil = all
	first []span

	// [B·n, R/2]: features are rotated on the way to heads, and back on the way to seq; nil = as
	// they are
	cos, sin tensor.Tensor
	norm     HeadNorm // on the way to heads, before they are rotated
}

// block is the elements of a part that rank i's heads have at rank j's rows.
func (t *part) block(i, j int64) int64 {
	return t.split[i].n() * t.seq.Shape[0] * t.rows[j].n() * t.seq.Shape[3]
}

// mine is this rank's rows of rank j's heads, head-major: [h_j, B, n, D].
func (t *part) mine(heads span) tensor.Tensor {
	return t.seq.Slice(2, heads.lo, heads.hi).Permute(2, 0, 1, 3)
}

// rowsOf returns rank j's rows of this rank's heads: [h, B, n_j, D].
func (t *part) rowsOf(j int64) tensor.Tensor {
	return t.heads.Slice(2, t.rows[j].lo, t.rows[j].hi)
}

// between returns the elements that this rank sends to rank j on the way to heads, and those that
// it receives from rank j. The way back sends what the way there receives.
func (p *Plan) between(parts []part, j int64) (send, recv int64) {
	if j == p.rank {
		return 0, 0
	}
	for i := range parts {
		send += parts[i].block(j, p.rank)
		recv += parts[i].block(p.rank, j)
	}
	return send, recv
}

// wireElements returns what an all-to-all from tokens to heads sends and receives at this rank.
func (p *Plan) wireElements(parts []part) (send, recv int64) {
	for j := range p.size {
		s, r := p.between(parts, j)
		send, recv = send+s, recv+r
	}
	return send, recv
}

// count fills p.send and p.recv for one all-to-all and returns their sums.
func (p *Plan) count(parts []part, toHeads bool) (sent, received int64) {
	for j := range p.size {
		send, recv := p.between(parts, j)
		if !toHeads {
			send, recv = recv, send
		}
		p.send[j], p.recv[j] = send, recv
		sent, received = sent+send, received+recv
	}
	return sent, received
}

// A block on the wire, one tensor after the other, has the layout of the local tensors: [h, B, n,
// D] in memory, so that unpacking it into [h, B, S, D] is h·B runs of n·D elements; with tokens
// first [B, n, h, D], which unpacks into B runs. A rank's block for itself does not pass the wire.

// seqToHeads fills the heads of parts from their seq in one all-to-all.
func (p *Plan) seqToHeads(s device.Stream, wire tensor.Tensor, parts []part) error {
	return p.reshard(s, wire, parts, true)
}

// headsToSeq fills the seq of parts from their heads in one all-to-all: the inverse of seqToHeads,
// and its adjoint where first is set, which adds the copies of a head in rank order.
func (p *Plan) headsToSeq(s device.Stream, wire tensor.Tensor, parts []part) error {
	return p.reshard(s, wire, parts, false)
}

func (p *Plan) reshard(s device.Stream, wire tensor.Tensor, parts []part, toHeads bool) error {
	sent, received := p.count(parts, toHeads)
	if err := p.pack(s, wire, parts, toHeads); err != nil {
		return err
	}
	if p.size > 1 {
		src, dst := onWire(wire, parts[0].seq.DType, sent, received)
		if err := p.comm.AllToAll(s, dst, src, p.recv, p.send); err != nil {
			return err
		}
	}
	return p.unpack(s, wire, sent, parts, toHeads)
}

// onWire returns the sent elements at the front of the wire and the received ones behind them.
func onWire(wire tensor.Tensor, dtype tensor.DType, sent, received int64) (src, dst tensor.Tensor) {
	return wire.At(0, dtype, sent), wire.At(sent*dtype.Size(), dtype, received)
}

// pack fills the front of the wire.
func (p *Plan) pack(s device.Stream, wire tensor.Tensor, parts []part, toHeads bool) error {
	return p.walk(s, wire, 0, parts, toHeads, true)
}

// unpack reads what came, which is on the wire from element at on.
func (p *Plan) unpack(s device.Stream, wire tensor.Tensor, at int64, parts []part, toHeads bool) error {
	if err := p.walk(s, wire, at, parts, toHeads, false); err != nil || toHeads {
		return err
	}
	for i := range parts {
		if t := &parts[i]; t.first != nil && !t.cos.IsNil() { // copies of a head are added first
			all := t.mine(span{0, t.seq.Shape[2]})
			if err := p.rotate(s, t, all, span{}, all, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// walk packs or unpacks the blocks of the wire in order, rank by rank, from element at on. Packing
// on the way to heads and unpacking on the way back, a block is this rank's rows of another rank's
// heads; otherwise it is another rank's rows of this rank's heads. The rows and heads that stay on
// this rank are copied where a block is of the first kind.
func (p *Plan) walk(s device.Stream, wire tensor.Tensor, at int64, parts []part, toHeads, pack bool) error {
	ofSeq := toHeads == pack
	for j := range p.size {
		heads, rows := p.rank, j
		if ofSeq {
			heads, rows = j, p.rank
		}
		for i := range parts {
			t := &parts[i]
			block := t.rowsOf(j) // of heads: its own where j is this rank
			if j != p.rank {
				block, at = p.block(wire, at, t, t.split[heads].n(), t.rows[rows].n())
			} else if !ofSeq {
				continue
			}
			var err error
			switch {
			case ofSeq && pack:
				err = p.rotate(s, t, block, t.split[j], t.mine(t.split[j]), false)
			case ofSeq:
				err = p.merge(s, t, j, block)
			case pack:
				err = p.copy(s, block, t.rowsOf(j))
			default:
				err = p.copy(s, t.rowsOf(j), block)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// merge writes rank j's heads into the rows of t, adding where a lower rank had the head too. src
// is [h_j, B, n, D].
func (p *Plan) merge(s device.Stream, t *part, j int64, src tensor.Tensor) error {
	heads := t.split[j]
	if t.first == nil {
		return p.rotate(s, t, t.mine(heads), heads, src, true)
	}
	if heads == t.first[j] {
		return p.copy(s, t.mine(heads), src)
	}
	shared := t.first[j].lo - heads.lo
	if sum := t.mine(span{heads.lo, t.first[j].lo}); sum.Numel() > 0 {
		if err := p.dev.Add(s, sum, sum, src.Slice(0, 0, shared)); err != nil {
			return err
		}
	}
	return p.copy(s, t.mine(t.first[j]), src.Slice(0, shared, heads.n()))
}

// block carves the next block [h, B, n, D] of a part off the wire, at an element offset; it returns
// the offset behind it.
func (p *Plan) block(wire tensor.Tensor, at int64, t *part, heads, rows int64) (tensor.Tensor, int64) {
	c := device.Allocator{Mem: wire, Align: 1, Used: at * t.seq.DType.Size()}
	block := p.take(&c, t.seq.DType, heads, t.seq.Shape[0], rows, t.seq.Shape[3])
	return block, at + block.Numel()
}

func (p *Plan) copy(s device.Stream, dst, src tensor.Tensor) error {
	if src.Numel() == 0 {
		return nil
	}
	return p.dev.Copy(s, dst, src)
}

// rotate is copy of these heads with the rotation of the part, if it has one: both are [h, B, n,
// D], n this rank's rows.
func (p *Plan) rotate(s device.Stream, t *part, dst tensor.Tensor, heads span, src tensor.Tensor, inverse bool) error {
	if t.cos.IsNil() {
		return p.copy(s, dst, src)
	}
	n := src.Shape[2]
	for b := range src.Shape[1] {
		x, y := src.Select(1, b).Permute(1, 0, 2), dst.Select(1, b).Permute(1, 0, 2) // [n, h, D]
		if x.Numel() == 0 {
			continue
		}
		p.rope = device.Rope{X: x, Y: y, Cos: t.cos.Slice(0, b*n, (b+1)*n), Sin: t.sin.Slice(0, b*n, (b+1)*n), Inverse: inverse}
		if w := t.norm.W; !w.IsNil() && !inverse {
			p.rope.W, p.rope.Eps, p.rope.Centre = w, t.norm.Eps, t.norm.Centre
			p.rope.RStd = t.norm.RStd.Slice(0, b*n, (b+1)*n).Slice(1, heads.lo, heads.hi)
		}
		if err := p.dev.Rope(s, &p.rope); err != nil {
			return err
		}
	}
	return nil
}

// Reshard is n tensors that change layout in one exchange.
type Reshard struct {
	// Seq are [B, rows, H, ·] with this rank's rows of all heads, Heads [B, S, h, ·] with all rows
	// of this rank's heads (Plan.Heads). Any strides with a dense last axis. All have one type.
	Seq, Heads []tensor.Tensor
	// Shared says, for each, that its heads and rows are those of keys; nil = none.
	Shared []bool
	// SumCopies makes HeadsToSeq add up the copies of shared heads that several ranks hold, in rank
	// order: the adjoint of SeqToHeads. Without it the lowest rank's copy is taken: the inverse.
	// F32, or the device's other types of activations, then rounded after each.
	SumCopies bool
	Workspace tensor.Tensor // U8, ReshardWorkspace bytes, aligned to Info.Align
}

// SeqToHeads writes r.Heads from r.Seq. HeadsToSeq writes r.Seq from r.Heads. Each is the other's
// inverse, and its adjoint. Collective.
func (p *Plan) SeqToHeads(s device.Stream, b *Batch, r *Reshard) error {
	parts, err := p.reshardParts("sp.SeqToHeads", b, r, false)
	if err = p.Admit.Result(err); err != nil || len(parts) == 0 {
		return err
	}
	return p.seqToHeads(s, bytesOf(r.Workspace), parts)
}

// HeadsToSeq is described at SeqToHeads.
func (p *Plan) HeadsToSeq(s device.Stream, b *Batch, r *Reshard) error {
	parts, err := p.reshardParts("sp.HeadsToSeq", b, r, true)
	if err = p.Admit.Result(err); err != nil || len(parts) == 0 {
		return err
	}
	return p.headsToSeq(s, bytesOf(r.Workspace), parts)
}

// bytesOf makes absent memory an empty block.
func bytesOf(t tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		return tensor.Of(nil, tensor.U8, 0)
	}
	return t
}

// ReshardWorkspace is the bytes that either direction needs; tensors may lack memory, their shapes
// count.
func (p *Plan) ReshardWorkspace(b *Batch, r *Reshard) (int64, error) {
	sketch := *r
	sketch.Workspace = tensor.Tensor{}
	parts, err := p.partsOf("sp.ReshardWorkspace", b, &sketch, false)
	if err != nil || len(parts) == 0 {
		return 0, err
	}
	send, recv := p.wireElements(parts)
	return (send + recv) * parts[0].seq.DType.Size(), nil
}

func (p *Plan) reshardParts(op string, b *Batch, r *Reshard, back bool) ([]part, error) {
	parts, err := p.partsOf(op, b, r, back)
	if err != nil || len(parts) == 0 {
		return nil, err
	}
	send, recv := p.wireElements(parts)
	need := (send + recv) * parts[0].seq.DType.Size()
	return parts, checkBytes(op, "workspace", r.Workspace, need)
}

// partsOf checks the tensors of a reshard and pairs them up.
func (p *Plan) partsOf(op string, b *Batch, r *Reshard, back bool) ([]part, error) {
	if err := p.checkBatch(op, b); err != nil {
		return nil, err
	}
	if len(r.Seq) != len(r.Heads) || (r.Shared != nil && len(r.Shared) != len(r.Seq)) {
		return nil, status.Errorf(status.InvalidArgument, "%s: %d seq tensors, %d heads tensors, %d shared flags: give as many of each",
			op, len(r.Seq), len(r.Heads), len(r.Shared))
	}
	parts := p.parts[:0] // no allocation but the first time
	for i := range r.Seq {
		t := part{seq: r.Seq[i], split: p.query, rows: b.queries.rows}
		h, all, n := p.layer.Heads, b.queries.n, b.Rows()
		shared := r.Shared != nil && r.Shared[i]
		if shared {
			t.split, t.rows, h, all, n = p.key, b.keys.rows, p.layer.KVHeads, b.keys.n, b.KVRows()
		}
		summed := p.dev.Info().Compute
		if t.seq.DType != r.Seq[0].DType || r.Heads[i].DType != r.Seq[0].DType || (r.SumCopies && !slices.Contains(summed, t.seq.DType)) {
			return nil, status.Errorf(status.InvalidArgument, "%s: tensor %d: %v and %v: all need one type, one of %v where copies are summed",
				op, i, t.seq, r.Heads[i], summed)
		}
		d := t.seq.Shape[3]
		if err := checkTensor(op, "seq", t.seq, t.seq.DType, b.spec.Batch, n, h, d); err != nil {
			return nil, err
		}
		if err := checkTensor(op, "heads", r.Heads[i], t.seq.DType, b.spec.Batch, all, t.split[p.rank].n(), d); err != nil {
			return nil, err
		}
		t.heads = r.Heads[i].Permute(2, 0, 1, 3)
		switch {
		case shared && back && r.SumCopies:
			t.first = p.owned
		case shared && back: // only the lowest holder sends
			t.heads = t.heads.Slice(0, p.owned[p.rank].lo-p.key[p.rank].lo, p.key[p.rank].n())
			t.split = p.owned
		}
		parts = append(parts, t)
	}
	p.parts = parts
	return parts, nil
}
