package model

import (
	"fmt"

	"ulysses/device"
	"ulysses/tensor"
)

// experts is an MLP with a router (Shazeer et al. 2017, arXiv:1701.06538): the k experts with the
// largest router logits compute a token, and the output is the sum of their outputs, weighted by
// the router's probabilities. Every rank has all experts and computes its own tokens, unless the
// experts are divided among ranks (dispatch). No choice of an expert is dropped: memory is for k
// rows of each token, however they are distributed.
//
// The sums over the rows of an expert, and over the experts of a token, have an order that depends
// on the tokens alone, so the output of a token is bitwise equal on every mesh and for every tile.
type experts struct {
	router         *Param // [E, hidden]
	routerBias     *Param // [E]; nil = none
	gateUp, down   stack
	count, k       int64         // E, and the experts of a token
	width, hiddens int64         // F of an expert, and hidden
	form           device.Route  // how experts are chosen, without tensors
	clamped        bool          // the activation is that of gpt-oss
	sparse         int64         // the number of this layer among the layers with experts
	shared         *sharedExpert // of all tokens; nil = none

	// saved between the halves, or of the current tile
	routing routing
	hidden  tensor.Tensor // [T·k, 2F], gate and up, then their gradients
	rows    tensor.Tensor // [T·k, hidden], the inputs, outputs and gradients of the experts
	act     tensor.Tensor // [T·k, F], the input of down, then its gradient
	dlogits tensor.Tensor // [T, E] of the compute type
	dweight tensor.Tensor // [T·k] F32
	biases  expertBiases
	tiles   *mlpTiles

	remote *dispatch // the experts are divided among ranks; nil = this rank has all
}

// routing is the choice of experts, see device.Route.
type routing struct {
	probs   tensor.Tensor // [T, E] F32
	chosen  tensor.Tensor // [T, k] I32
	rows    tensor.Tensor // [T, k] I32
	weights tensor.Tensor // [T·k] F32
	offsets tensor.Tensor // [E+1] I32
}

// expertBiases is working memory for gradients of biases; nil without biases.
type expertBiases struct {
	factors, product tensor.Tensor // [R, 1]
	wide             tensor.Tensor // [R, 1] F32
}

func (b *expertBiases) allocate(p *pass, m *experts, rows int64) {
	if len(m.down.b) > 0 {
		b.factors, b.product, b.wide = p.temp(rows, 1), p.temp(rows, 1), p.tempF32(rows, 1)
	}
}

// first returns the memory for the first n rows.
func (b *expertBiases) first(n int64) expertBiases {
	if b.factors.IsNil() {
		return expertBiases{}
	}
	return expertBiases{firstRows(b.factors, n), firstRows(b.product, n), firstRows(b.wide, n)}
}

// activation returns the form of SwiGLU.
func (m *experts) activation() form {
	if m.clamped {
		return formClamped
	}
	return formSiLU
}

func newExperts(cfg *Config, layer int64) *experts {
	e, names := cfg.Experts, cfg.family.experts
	name := func(suffix string) string {
		return fmt.Sprintf("model.layers.%d.%s.%s", layer, names.block, suffix)
	}
	m := &experts{count: e.Count, k: e.PerToken, width: e.Size, hiddens: cfg.HiddenSize, clamped: names.stacked,
		form: device.Route{Normalize: e.Normalize, Sigmoid: e.Sigmoid, Groups: e.Groups, KeptGroups: e.KeptGroups,
			WeightScale: e.Scale}}
	for i := range layer {
		if cfg.Sparse(i) {
			m.sparse++
		}
	}
	m.router = newParam(name(names.routerName()+".weight"), cfg.DType, normal, []string{names.number, "hidden_size"},
		e.Count, cfg.HiddenSize)
	m.router.bare = true
	if names.stacked {
		m.routerBias = newParam(name(names.routerName()+".bias"), cfg.DType, zeros, []string{names.number}, e.Count)
	}
	param := func(expert int64, part string, start fill, axes []string, shape ...int64) *Param {
		p := newParam(name(fmt.Sprintf("experts.%d.%s", expert, part)), cfg.DType, start, axes, shape...)
		p.expert, p.number, p.experts = true, expert, e.Count
		return p
	}
	var gateUp, gateUpBias, down, downBias []*Param
	for i := range e.Count {
		if names.stacked {
			gateUp = append(gateUp,
				param(i, ossGateUp, normal, []string{"hidden_size", "2 " + names.size}, cfg.HiddenSize, 2*e.Size))
			gateUpBias = append(gateUpBias, param(i, ossGateUp+ossBias, zeros, []string{"2 " + names.size}, 2*e.Size))
			down = append(down, param(i, ossDown, normal, []string{names.size, "hidden_size"}, e.Size, cfg.HiddenSize))
			downBias = append(downBias, param(i, ossDown+ossBias, zeros, []string{"hidden_size"}, cfg.HiddenSize))
			continue
		}
		for _, part := range []string{names.gate, names.up} {
			gateUp = append(gateUp,
				param(i, part+".weight", normal, []string{names.size, "hidden_size"}, e.Size, cfg.HiddenSize))
		}
		down = append(down,
			param(i, names.down+".weight", normal, []string{"hidden_size", names.size}, cfg.HiddenSize, e.Size))
	}
	m.gateUp = newStack(e.Count, cfg.HiddenSize, 2*e.Size, gateUp, gateUpBias)
	m.down = newStack(e.Count, e.Size, cfg.HiddenSize, down, downBias)
	if e.Shared > 0 {
		m.shared = newSharedExpert(cfg, name)
	}
	m.tiles = newMLPTiles(m)
	return m
}

func (m *experts) Params() []*Param {
	all := []*Param{m.router}
	if m.routerBias != nil {
		all = append(all, m.routerBias)
	}
	all = append(append(all, m.gateUp.params()...), m.down.params()...)
	if m.shared != nil {
		all = append(all, m.shared.params()...)
	}
	return all
}

// tile returns the tokens of a tile, 0 = all, and whether the layer runs in tiles.
func (m *experts) tile(p *pass) (tokens int64, tiled bool) {
	if m.remote != nil {
		return m.remote.round(p), true
	}
	return p.mlpTile()
}

// visitSaved visits the choice of experts, and gate and up. Each has the category of the MLP.
func (m *experts) visitSaved(p *pass) {
	if _, tiled := m.tile(p); tiled {
		return
	}
	r := &m.routing
	p.visitF32(&r.probs, mlpSaved, p.tokens, m.count)
	p.visitAs(&r.chosen, mlpSaved, tensor.I32, p.tokens, m.k)
	p.visitAs(&r.rows, mlpSaved, tensor.I32, p.tokens, m.k)
	p.visitF32(&r.weights, mlpSaved, p.tokens*m.k)
	p.visitAs(&r.offsets, mlpSaved, tensor.I32, m.count+1)
	p.visit(&m.hidden, mlpSaved, p.tokens*m.k, 2*m.width)
	if m.shared != nil {
		m.shared.visitSaved(p)
	}
}

// allocate returns the routing of some tokens in temporary memory.
func (m *experts) allocate(p *pass, tokens int64) routing {
	return routing{probs: p.tempF32(tokens, m.count), chosen: p.alloc(tensor.I32, tokens, m.k),
		rows: p.alloc(tensor.I32, tokens, m.k), weights: p.tempF32(tokens * m.k),
		offsets: p.alloc(tensor.I32, m.count+1)}
}

// first returns the routing memory for the first tokens.
func (r *routing) first(tokens int64) routing {
	k := r.chosen.Shape[1]
	return routing{probs: r.probs.Slice(0, 0, tokens), chosen: r.chosen.Slice(0, 0, tokens),
		rows: r.rows.Slice(0, 0, tokens), weights: r.weights.Slice(0, 0, tokens*k), offsets: r.offsets}
}

// begin allocates the working memory of tiles.
func (m *experts) begin(p *pass, tokens int64, backward bool) {
	m.routing, m.hidden = m.allocate(p, tokens), p.temp(tokens*m.k, 2*m.width)
	if m.shared != nil {
		m.shared.allocate(p, tokens)
	}
	m.working(p, tokens, backward)
	if m.shared != nil {
		m.shared.sketch(p, tokens)
	}
}

// working allocates the memory that a half needs beyond what is saved.
func (m *experts) working(p *pass, tokens int64, backward bool) {
	m.rows, m.act = p.temp(tokens*m.k, m.hiddens), p.temp(tokens*m.k, m.width)
	if backward {
		m.dlogits, m.dweight = p.temp(tokens, m.count), p.tempF32(tokens*m.k)
		m.biases.allocate(p, m, tokens*m.k)
	}
	if m.shared != nil {
		m.shared.working(p, tokens, backward)
	}
}

func (m *experts) Forward(p *pass, x tensor.Tensor) {
	if tokens, tiled := m.tile(p); tiled {
		m.tiles.run(p, tokens, x, tensor.Tensor{})
		return
	}
	mark, saved, hidden := p.mark(), m.routing, m.hidden
	if hidden.IsNil() {
		m.routing, m.hidden = m.allocate(p, p.tokens), p.temp(p.tokens*m.k, 2*m.width)
		if m.shared != nil {
			m.shared.allocate(p, p.tokens)
			defer func() { m.shared.hidden, m.shared.logit = tensor.Tensor{}, tensor.Tensor{} }()
		}
	}
	m.working(p, p.tokens, false)
	p.phase("mlp")
	m.forwardRows(p, x, x, p.sequencesAt(0, p.tokens))
	p.end()
	m.routing, m.hidden = saved, hidden
	p.reset(mark)
}

func (m *experts) Backward(p *pass, x, dy tensor.Tensor) {
	if tokens, tiled := m.tile(p); tiled {
		m.tiles.run(p, tokens, x, dy)
		return
	}
	mark := p.mark()
	m.working(p, p.tokens, true)
	p.phase("mlp")
	m.backwardRows(p, m.routing, m.hidden, x, dy, x, p.sequencesAt(0, p.tokens))
	m.gradReady(p)
	p.end()
	p.reset(mark)
}

// forwardRows writes the output of tokens x [T, hidden] to out, which may be x. sequence [T] has
// the sequences of the tokens, whose choices are counted in the forward half of a pass.
func (m *experts) forwardRows(p *pass, out, x, sequence tensor.Tensor) {
	r, hidden := m.project(p, x, sequence)
	n := x.Shape[0] * m.k
	rows, act := m.rows.Slice(0, 0, n), m.act.Slice(0, 0, n)
	m.compute(p, rows, hidden, act, r.offsets)
	m.combine(p, out, x, rows, &r)
}

// compute writes the outputs of the experts to rows, from gate and up of the same rows.
func (m *experts) compute(p *pass, rows, hidden, act, offsets tensor.Tensor) {
	gate, up := m.split(hidden)
	p.SwiGLU(act, gate, up, m.activation())
	m.down.forward(p, rows, act, offsets)
}

// split returns views of gate and up of some rows.
func (m *experts) split(hidden tensor.Tensor) (gate, up tensor.Tensor) {
	return hidden.Slice(1, 0, m.width), hidden.Slice(1, m.width, 2*m.width)
}

// combine writes the weighted sums of the outputs in rows, and of the shared expert, to out, which
// may be the tokens x.
func (m *experts) combine(p *pass, out, x, rows tensor.Tensor, r *routing) {
	var own, weights tensor.Tensor
	if m.shared != nil {
		own, weights = m.shared.forward(p, x)
	}
	p.CombineRows(out, rows, r.rows, r.weights, own, weights)
}

// project chooses the experts of tokens x, and computes gate and up.
func (m *experts) project(p *pass, x, sequence tensor.Tensor) (r routing, hidden tensor.Tensor) {
	n := x.Shape[0] * m.k
	r, hidden = m.choose(p, x, sequence), m.hidden.Slice(0, 0, n)
	rows := m.rows.Slice(0, 0, n)
	p.SpreadRows(rows, x, r.rows)
	m.gateUp.forward(p, hidden, rows, r.offsets)
	return r, hidden
}

// choose chooses the experts of tokens x.
func (m *experts) choose(p *pass, x, sequence tensor.Tensor) routing {
	r := m.routing.first(x.Shape[0])
	var bias tensor.Tensor
	if m.routerBias != nil {
		bias = m.routerBias.Value
	}
	p.Gemm(r.probs, x, m.router.Value.Permute(1, 0), bias)
	p.Route(&r, &m.form, p.bias.of(m.sparse), sequence, m.sparse)
	return r
}

// backwardRows adds to the gradients of the weights, and writes the gradient of tokens x to dx,
// which may be x. It overwrites hidden.
func (m *experts) backwardRows(p *pass, r routing, hidden, x, dy, dx, sequence tensor.Tensor) {
	n := x.Shape[0] * m.k
	rows, act, dweight := m.rows.Slice(0, 0, n), m.act.Slice(0, 0, n), m.dweight.Slice(0, 0, n)
	p.SpreadRows(rows, dy, r.rows)
	m.backwardDown(p, rows, hidden, act, r.weights, dweight, r.offsets)
	if m.gateUp.trains() {
		p.SpreadRows(rows, x, r.rows)
	}
	m.backwardGateUp(p, rows, hidden, rows, r.offsets)
	m.backwardTokens(p, r, rows, dweight, x, dy, dx, sequence)
}

// backwardDown overwrites gate and up of some rows with their gradients, given the gradients dy of
// the weighted outputs, and adds to the gradients of down. dweight becomes the gradients of the
// weights.
//
// The gradient of a weight is dy·y, where y is the expert's output. It is computed as (Wᵀdy)·a from
// the input a of down, because y is not saved. For the gradient of down, the weight multiplies a
// instead of dy.
func (m *experts) backwardDown(p *pass, dy, hidden, act, weights, dweight, offsets tensor.Tensor) {
	gate, up := m.split(hidden)
	m.down.backwardInput(p, act, dy, offsets)
	p.WeightedSwiGLUBack(act, gate, up, weights, dweight, m.activation())
	b := m.biases.first(dy.Shape[0])
	m.down.addBiasProducts(p, dweight, dy, b.product, b.wide, offsets)
	if len(m.down.b) > 0 {
		p.Copy(b.factors, weights.View(dy.Shape[0], 1))
	}
	m.down.addWeights(p, dy, act, b.factors, offsets)
}

// backwardGateUp adds to the gradients of gate and up, given their inputs x and the gradients of
// their outputs, and computes the gradient dx of the inputs, which may be x.
func (m *experts) backwardGateUp(p *pass, dx, hidden, x, offsets tensor.Tensor) {
	b := m.biases.first(hidden.Shape[0])
	if len(m.gateUp.b) > 0 {
		p.fill(b.factors, 1)
	}
	m.gateUp.addWeights(p, hidden, x, b.factors, offsets)
	m.gateUp.backwardInput(p, dx, hidden, offsets)
}

// backwardTokens writes the gradient of tokens x to dx, which may be x, given the gradients of the
// experts' inputs in rows, and of the weights. It adds to the gradients of the router and of the
// shared expert.
func (m *experts) backwardTokens(p *pass, r routing, rows, dweight, x, dy, dx, sequence tensor.Tensor) {
	dlogits := m.dlogits.Slice(0, 0, x.Shape[0])
	p.RouteBack(dlogits, dweight, &r, &m.form, sequence, m.sparse)
	if !m.router.Frozen {
		p.GemmAdd(m.router.Grad, dlogits.Permute(1, 0), x)
	}
	if b := m.routerBias; b != nil && !b.Frozen {
		p.ColumnSum(b.Grad, dlogits)
	}
	var own tensor.Tensor
	if m.shared != nil {
		own = m.shared.backward(p, x, dy)
	}
	p.CombineRows(dx, rows, r.rows, tensor.Tensor{}, own, tensor.Tensor{})
	p.GemmAdd(dx, dlogits, m.router.Value)
}

// forwardTile and backwardTile compute tokens [lo, lo + T) of the pass, see tokenwise.
func (m *experts) forwardTile(p *pass, out, x tensor.Tensor, lo int64) {
	m.forwardRows(p, out, x, p.sequencesAt(lo, x.Shape[0]))
}

func (m *experts) backwardTile(p *pass, dx, x, dy tensor.Tensor, lo int64) {
	r, hidden := m.project(p, x, tensor.Tensor{})
	if m.shared != nil {
		m.shared.project(p, x)
	}
	m.backwardRows(p, r, hidden, x, dy, dx, p.sequencesAt(lo, x.Shape[0]))
}

func (m *experts) gradReady(p *pass) {
	m.down.gradReady(p)
	m.gateUp.gradReady(p)
	p.gradReady(m.router)
	if m.routerBias != nil {
		p.gradReady(m.routerBias)
	}
	if m.shared != nil {
		m.shared.gradReady(p)
	}
}

// Route chooses the experts of a layer in the form from the logits in r.probs and the bias, which
// may be nil, and counts the choices of sequences in the forward half of a pass.
func (p *pass) Route(r *routing, form *device.Route, bias, sequence tensor.Tensor, layer int64) {
	if p.skip() {
		return
	}
	p.route = *form
	p.route.Logits, p.route.Bias, p.route.Experts, p.route.Rows = r.probs, bias, r.chosen, r.rows
	p.route.Weights, p.route.Offsets = r.weights, r.offsets
	if p.balance.counting && !sequence.IsNil() {
		p.route.Sequence, p.route.Counts, p.route.Sums = sequence, p.balance.counts.Select(0, layer),
			p.balance.sums.Select(0, layer)
	}
	p.err = p.dev.RouteForward(p.ctx.Stream, &p.route)
}

// RouteBack writes the gradient dlogits of the router's logits, with that of the balancing loss.
func (p *pass) RouteBack(dlogits, dweights tensor.Tensor, r *routing, form *device.Route, sequence tensor.Tensor,
	layer int64) {
	if p.skip() {
		return
	}
	p.routeGrad = device.RouteGrad{Probs: r.probs, Experts: r.chosen, Rows: r.rows, Weights: r.weights,
		DWeights: dweights, DLogits: dlogits, Normalize: form.Normalize, Sigmoid: form.Sigmoid,
		WeightScale: form.WeightScale}
	if p.balance.loss && !sequence.IsNil() {
		p.routeGrad.Sequence, p.routeGrad.Counts, p.routeGrad.Scale = sequence, p.balance.counts.Select(0, layer),
			p.balance.scale
	}
	p.err = p.dev.RouteBackward(p.ctx.Stream, &p.routeGrad)
}

// SpreadRows copies each token of x to its rows of y.
func (e *executor) SpreadRows(y, x, rows tensor.Tensor) {
	if !e.skip() {
		e.spread = device.SpreadRows{X: x, Rows: rows, Y: y}
		e.err = e.dev.SpreadRows(e.ctx.Stream, &e.spread)
	}
}

// CombineRows adds the rows of each token in x and its own row, times their weights unless these
// are nil.
func (e *executor) CombineRows(y, x, rows, weights, own, ownWeights tensor.Tensor) {
	if !e.skip() {
		e.combine = device.CombineRows{X: x, Rows: rows, Weights: weights, Y: y, Own: own, OwnWeights: ownWeights}
		e.err = e.dev.CombineRows(e.ctx.Stream, &e.combine)
	}
}

// GroupedGemm computes c = a·b[e] + bias[e] for the rows of each expert e; bias may be nil.
func (e *executor) GroupedGemm(c, a, b, bias, offsets tensor.Tensor) {
	if !e.skip() {
		e.grouped = device.GroupedGemm{A: a, B: b, Bias: bias, C: c, Offsets: offsets}
		e.err = e.dev.GroupedGemm(e.ctx.Stream, &e.grouped)
	}
}

// GroupedGemmWeights adds aᵀ·b over the rows of each expert e to c[e].
func (e *executor) GroupedGemmWeights(c, a, b, offsets tensor.Tensor) {
	if !e.skip() {
		e.groupedGrad = device.GroupedGemmWeights{A: a, B: b, C: c, Offsets: offsets}
		e.err = e.dev.GroupedGemmWeights(e.ctx.Stream, &e.groupedGrad)
	}
}

// WeightedSwiGLUBack overwrites gate and up with the gradients of weights·y, and dy, which is that
// gradient without the weights, with weights·y.
func (e *executor) WeightedSwiGLUBack(dy, gate, up, weights, dweights tensor.Tensor, f form) {
	if !e.skip() {
		e.weightedGrad = device.WeightedSwiGLUGrad{Gate: gate, Up: up, Weights: weights, DY: dy, DGate: gate, DUp: up,
			DWeights: dweights, Restore: true, GELU: f == formGELU, Clamped: f == formClamped}
		e.err = e.dev.WeightedSwiGLUBackward(e.ctx.Stream, &e.weightedGrad)
	}
}
