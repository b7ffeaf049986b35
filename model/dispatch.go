package model

import (
	"math"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// dispatch computes experts that are divided among ranks (expert parallelism; Lepikhin et al. 2020,
// arXiv:2006.16668, without its limit of tokens): rank r has experts comm.Shard(E, N, r). Each rank
// chooses the experts of its own tokens and sends a row for each choice to the rank of the expert,
// which returns the output. The rank of the token weights and adds the outputs in the same order as
// without a division, so the output of a token has the bits of one rank.
//
// The rows that arrive at a rank come in the order of the ranks, and from each in the order of
// experts and tokens. They are put in the order of experts, then of ranks, then of tokens, so that
// one grouped product computes all experts, and sums over the rows of an expert have a fixed order.
//
// In the worst case all tokens choose the experts of one rank. Memory is for this case, therefore a
// layer runs in rounds of so many tokens of each rank (round). Nothing of a round is saved: the
// backward half sends the rows again.
type dispatch struct {
	m     *experts
	comm  comm.Comm // of the N ranks that the experts are divided among
	even  bool      // the device computes nothing, and all experts are taken as chosen equally
	first []int64   // first expert of each rank, and E

	// of the current tile
	out     tensor.Tensor // [C·k, hidden], the rows of this rank's tokens
	arrived tensor.Tensor // [N·C·k, hidden], the rows of all ranks for this rank's experts, by rank
	sorted  tensor.Tensor // the same by expert
	grads   tensor.Tensor // the same by expert: the gradients of the outputs, then of the inputs
	hidden  tensor.Tensor // [N·C·k, 2F]
	act     tensor.Tensor // [N·C·k, F]
	// [N·C·k] F32: weights and their gradients, by rank and by expert
	arrivedWeights, weights, dweights tensor.Tensor
	place                             tensor.Tensor // [N·C·k, 1] I32, the row of sorted of each row of arrived
	offsets                           tensor.Tensor // [held+1] I32, of the experts in sorted

	host dispatchHost
}

// dispatchHost is memory on the host.
type dispatchHost struct {
	offsets []int32 // [E+1], of this rank's rows
	ends    []int32 // [held+1], of the rows that have arrived
	places  []int32 // [rows that have arrived]
	counts  []int64 // [N, E]: the choices of each expert by the tokens of each rank
	rows    []int64 // N times E: the extents of counts for AllGather
	// [N] rows that are sent to each rank, and that arrive from it
	send, receive []int64
}

// ExpertShard returns the rank that has a parameter, of n ranks among which experts are divided;
// AllRanks if all ranks have it.
func (p *Param) ExpertShard(n int) int {
	if p.expert && n > 1 {
		for r := range n {
			if lo, hi := comm.Shard(p.experts, int64(n), int64(r)); lo <= p.number && p.number < hi {
				return r
			}
		}
	}
	return AllRanks
}

// divideExperts divides the experts of each layer among the ranks of c.
func (m *Model) divideExperts(c comm.Comm) error {
	if c == nil || c.Size() == 1 {
		return nil
	}
	n, count := int64(c.Size()), m.Config.Experts.Count
	if m.Config.SparseLayers() == 0 {
		return status.Errorf(status.InvalidConfig,
			"parallel.experts = %d: the model has no experts; remove parallel.experts", n)
	}
	if n > count {
		return status.Errorf(status.InvalidConfig,
			"parallel.experts = %d: the model has %d experts, and each rank needs at least one; set parallel.experts to a divisor of the number of ranks that is at most %d",
			n, count, count)
	}
	lo, hi := comm.Shard(count, n, int64(c.Rank()))
	for _, b := range m.blocks {
		x, ok := b.mlp.(*experts)
		if !ok {
			continue
		}
		for _, s := range []*stack{&x.gateUp, &x.down} {
			s.first, s.held = lo, hi-lo
		}
		x.remote = newDispatch(x, c, m.dev)
		x.tiles = newMLPTiles(x.remote)
		x.tiles.collective = true
	}
	m.expertRanks = c
	return nil
}

// assuming is a device that computes nothing.
type assuming interface{ Assumes() bool }

func newDispatch(m *experts, c comm.Comm, dev any) *dispatch {
	n := int64(c.Size())
	d := &dispatch{m: m, comm: c}
	if x, ok := dev.(assuming); ok {
		d.even = x.Assumes()
	}
	for r := range n {
		lo, _ := comm.Shard(m.count, n, r)
		d.first = append(d.first, lo)
	}
	d.first = append(d.first, m.count)
	h := &d.host
	h.offsets, h.ends = make([]int32, m.count+1), make([]int32, m.down.held+1)
	h.counts, h.rows = make([]int64, n*m.count), make([]int64, n)
	h.send, h.receive = make([]int64, n), make([]int64, n)
	for r := range h.rows {
		h.rows[r] = 1
	}
	return d
}

// expertRounds limits the memory of a layer: without tiles, the rows that may arrive in a round are
// so many times the rows of a rank.
const expertRounds = 4

// round returns the tokens of each rank in a round.
func (d *dispatch) round(p *pass) int64 {
	if p.tiles.MLP > 0 {
		return p.tiles.MLP
	}
	n := int64(d.comm.Size())
	return max(1, min(p.expertTokens, (p.expertTokens*expertRounds-1)/n+1))
}

// begin allocates the memory of rounds of at most so many tokens of each rank.
func (d *dispatch) begin(p *pass, tokens int64, backward bool) {
	m := d.m
	own, all := tokens*m.k, tokens*m.k*int64(d.comm.Size())
	if all > math.MaxInt32 && p.err == nil {
		p.err = status.Errorf(status.InvalidConfig,
			"model: %d tokens of each of %d ranks with %d experts each are %d rows in a round, and at most %d are numbered; set tile.mlp to %d tokens",
			tokens, d.comm.Size(), m.k, all, math.MaxInt32, math.MaxInt32/(int64(d.comm.Size())*m.k))
	}
	m.routing = m.allocate(p, tokens)
	if m.shared != nil {
		m.shared.allocate(p, tokens)
		m.shared.working(p, tokens, backward)
	}
	d.out, d.arrived, d.sorted = p.temp(own, m.hiddens), p.temp(all, m.hiddens), p.temp(all, m.hiddens)
	d.hidden, d.act = p.temp(all, 2*m.width), p.temp(all, m.width)
	d.place, d.offsets = p.alloc(tensor.I32, all, 1), p.alloc(tensor.I32, m.down.held+1)
	if backward {
		d.grads = p.temp(all, m.hiddens)
		d.arrivedWeights, d.weights, d.dweights = p.tempF32(all, 1), p.tempF32(all, 1), p.tempF32(all, 1)
		m.dlogits, m.dweight = p.temp(tokens, m.count), p.tempF32(own)
		m.biases.allocate(p, m, all)
	}
	if m.shared != nil {
		m.shared.sketch(p, tokens) // above all of this, which a tile keeps
	}
	if h := &d.host; int64(len(h.places)) < all && !p.skip() {
		p.err = p.ctx.Stream.Sync() // copies from the memory that is replaced
		h.places = make([]int32, all)
	}
}

// exchange tells the ranks the numbers of rows that they send to each other, from the choices of
// this rank's tokens. It waits for the stream, and returns the number of rows that will arrive.
// Collective.
func (d *dispatch) exchange(p *pass, tokens int64, r *routing, backward bool) (arriving int64) {
	if p.skip() {
		return 0
	}
	m, h, me := d.m, &d.host, d.comm.Rank()
	if clear(h.offsets); tokens > 0 {
		p.Copy(tensor.OfInt32(h.offsets, m.count+1), r.offsets)
	}
	if p.skip() {
		return 0
	}
	if p.wait(d.comm); p.err != nil { // also before the memory on the host is used again
		return 0
	}
	if d.even {
		for e := range h.offsets {
			h.offsets[e] = int32(tokens * m.k * int64(e) / m.count)
		}
	}
	counts := h.counts[int64(me)*m.count:][:m.count]
	for e := range counts {
		counts[e] = int64(h.offsets[e+1] - h.offsets[e])
	}
	n := int64(d.comm.Size())
	if p.err = d.comm.AllGather(nil, tensor.OfInt64(h.counts, n, m.count), tensor.OfInt64(counts, 1, m.count),
		h.rows); p.err != nil {
		return 0
	}
	arriving = d.locate()
	d.count(p, backward)
	if arriving > 0 {
		p.Copy(d.place.Slice(0, 0, arriving), tensor.OfInt32(h.places[:arriving], arriving, 1))
	}
	p.Copy(d.offsets, tensor.OfInt32(h.ends, m.down.held+1))
	return arriving
}

// count adds the bytes that this rank sends in a round: forward, a row for each choice of an expert
// of another rank, and one for each row that has arrived from another rank; backward, rows of the
// input, of the gradient of the output and of the weight, and back the gradients of input and
// weight.
func (d *dispatch) count(p *pass, backward bool) {
	h, row := &d.host, d.m.hiddens*p.compute.Size()
	out, back := row, row
	if backward {
		out, back = 2*row+4, row+4
	}
	for r := range h.send {
		if r != d.comm.Rank() {
			p.expertBytes += h.send[r]*out + h.receive[r]*back
		}
	}
}

// locate computes, from the choices of all ranks, the rows that this rank sends and receives and
// the order of experts. It returns the number of rows that arrive.
func (d *dispatch) locate() (arriving int64) {
	m, h, first, held := d.m, &d.host, d.m.down.first, d.m.down.held
	for r := range h.send {
		h.send[r] = int64(h.offsets[d.first[r+1]] - h.offsets[d.first[r]])
		h.receive[r] = 0
		for e := first; e < first+held; e++ {
			h.receive[r] += h.counts[int64(r)*m.count+e]
		}
		arriving += h.receive[r]
	}
	at := int32(0) // in sorted
	for e := range held {
		h.ends[e] = at
		begin := int64(0) // of the rows of a rank, in arrived
		for r := range h.receive {
			counts := h.counts[int64(r)*m.count+first:][:held]
			from := begin
			for _, n := range counts[:e] {
				from += n
			}
			for i := range counts[e] {
				h.places[from+i] = at
				at++
			}
			begin += h.receive[r]
		}
	}
	h.ends[held] = at
	return arriving
}

// send sends rows of this rank's tokens to the ranks of their experts.
func (d *dispatch) send(p *pass, dst, src tensor.Tensor) {
	if !p.skip() {
		p.err = d.comm.AllToAll(p.ctx.Stream, dst, src, d.host.receive, d.host.send)
	}
}

// giveBack sends rows back to the ranks of their tokens.
func (d *dispatch) giveBack(p *pass, dst, src tensor.Tensor) {
	if !p.skip() {
		p.err = d.comm.AllToAll(p.ctx.Stream, dst, src, d.host.send, d.host.receive)
	}
}

// sort puts rows that have arrived in the order of experts, unsort puts them back.
func (d *dispatch) sort(p *pass, dst, src tensor.Tensor) {
	if src.Shape[0] > 0 {
		p.SpreadRows(dst, src, d.place.Slice(0, 0, src.Shape[0]))
	}
}

func (d *dispatch) unsort(p *pass, dst, src tensor.Tensor) {
	if src.Shape[0] > 0 {
		p.CombineRows(dst, src, d.place.Slice(0, 0, src.Shape[0]), tensor.Tensor{}, tensor.Tensor{}, tensor.Tensor{})
	}
}

// project chooses the experts of the tokens x of a tile, and computes gate and up of the n rows
// that arrive at this rank.
func (d *dispatch) project(p *pass, x, sequence tensor.Tensor, backward bool) (r routing, out tensor.Tensor, n int64) {
	m, tokens := d.m, x.Shape[0]
	r = m.routing.first(tokens)
	if tokens > 0 {
		r = m.choose(p, x, sequence)
	}
	n = d.exchange(p, tokens, &r, backward)
	out = d.out.Slice(0, 0, tokens*m.k)
	if tokens > 0 {
		p.SpreadRows(out, x, r.rows)
	}
	d.send(p, d.arrived, out)
	sorted := d.sorted.Slice(0, 0, n)
	d.sort(p, sorted, d.arrived.Slice(0, 0, n))
	if n > 0 {
		m.gateUp.forward(p, d.hidden.Slice(0, 0, n), sorted, d.offsets)
	}
	return r, out, n
}

func (d *dispatch) forwardTile(p *pass, y, x tensor.Tensor, lo int64) {
	m := d.m
	r, out, n := d.project(p, x, p.sequencesAt(lo, x.Shape[0]), false)
	sorted, arrived := d.sorted.Slice(0, 0, n), d.arrived.Slice(0, 0, n)
	if n > 0 {
		m.compute(p, sorted, d.hidden.Slice(0, 0, n), d.act.Slice(0, 0, n), d.offsets)
	}
	d.unsort(p, arrived, sorted)
	d.giveBack(p, out, arrived)
	if x.Shape[0] > 0 {
		m.combine(p, y, x, out, &r)
	}
}

func (d *dispatch) backwardTile(p *pass, dx, x, dy tensor.Tensor, lo int64) {
	m, tokens := d.m, x.Shape[0]
	r, out, n := d.project(p, x, tensor.Tensor{}, true)
	if m.shared != nil && tokens > 0 {
		m.shared.project(p, x)
	}
	arrived, sorted, grads := d.arrived.Slice(0, 0, n), d.sorted.Slice(0, 0, n), d.grads.Slice(0, 0, n)
	arrivedWeights, weights, dweights := d.arrivedWeights.Slice(0, 0, n), d.weights.Slice(0, 0, n),
		d.dweights.Slice(0, 0, n)
	hidden := d.hidden.Slice(0, 0, n)
	if tokens > 0 {
		p.SpreadRows(out, dy, r.rows)
	}
	d.send(p, arrived, out)
	d.sort(p, grads, arrived)
	d.send(p, arrivedWeights, r.weights.View(tokens*m.k, 1))
	d.sort(p, weights, arrivedWeights)
	if n > 0 {
		m.backwardDown(p, grads, hidden, d.act.Slice(0, 0, n), weights.View(n), dweights.View(n), d.offsets)
		m.backwardGateUp(p, grads, hidden, sorted, d.offsets)
	}
	d.unsort(p, arrived, grads)
	d.giveBack(p, out, arrived)
	d.unsort(p, arrivedWeights, dweights)
	dweight := m.dweight.Slice(0, 0, tokens*m.k)
	d.giveBack(p, dweight.View(tokens*m.k, 1), arrivedWeights)
	if tokens > 0 {
		m.backwardTokens(p, r, out, dweight, x, dy, dx, p.sequencesAt(lo, tokens))
	}
}

func (d *dispatch) gradReady(p *pass) { d.m.gradReady(p) }
