package model

import (
	"fmt"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// Model is a decoder on one rank: its parameters' shapes and names, and the passes over them.
// Whoever trains it owns the parameters' memory (Group.Bind). It serves one pass at a time.
type Model struct {
	Config *Config

	dev    device.Device
	comm   comm.Comm // of the ranks that share each sequence
	plans  plans
	alone  plans // of this rank by itself: for batches that one rank has whole
	groups []*Group
	embed  *Param // [V, hidden]
	blocks []*block
	head   *head
	orders map[bool][]Use // of passes with and without a backward half

	tiles       Tiles
	activations Activations
	visits      []int64         // layers in the order in which the backward half comes to them
	inputs      []tensor.Tensor // [T, hidden] of each segment
	stream      []tensor.Tensor // [T, hidden] before each layer of the segment under way
	off         offloader

	compute   tensor.DType // of activations and of the weights they meet
	constants *device.Arena
	freq      tensor.Tensor // [R/2] F32, RoPE's angle per position
	sum       tensor.Tensor // [1] F64, of the loss
	hostSum   []float64
	targets   []int32 // of the batch under way, on the host
	pass      pass
}

// Options are what a configuration does not say.
type Options struct {
	// Compute is F32 or another type of the device: activations and weights have it, while sums,
	// statistics, logits and gradients of weights are F32 all the same. 0 = F32.
	Compute  tensor.DType
	Strategy gdn.Strategy // of linear layers
	Tokens   int64        // of a batch, as far as is known: what Strategy Auto goes by
}

// New lays out a model on the ranks of c, which share each sequence. It is collective; what cannot
// be is refused on all ranks alike.
func New(d device.Device, c comm.Comm, cfg *Config, o Options) (*Model, error) {
	if o.Compute == tensor.Invalid {
		o.Compute = tensor.F32
	}
	m := &Model{Config: cfg, dev: d, comm: c, compute: o.Compute, hostSum: make([]float64, 1)}
	if err := m.plans.make(d, c, cfg, o); err != nil {
		return nil, err
	}
	if err := m.alone.make(d, comm.Local(1)[0], cfg, o); err != nil {
		return nil, err
	}
	vocabulary := []string{"vocab_size", "hidden_size"}
	m.embed = newParam("model.embed_tokens.weight", cfg.DType, normal, vocabulary, cfg.VocabSize, cfg.HiddenSize)
	m.groups = []*Group{{Name: "embed", Params: []*Param{m.embed}}}
	for i := range cfg.NumHiddenLayers {
		b := newBlock(cfg, i)
		m.blocks = append(m.blocks, b)
		m.groups = append(m.groups, &Group{Name: fmt.Sprintf("layer %d", i), Params: b.params()})
	}
	norm := newNorm(cfg, "model.norm.weight", "hidden_size", cfg.HiddenSize)
	last, matrix := &Group{Name: "head", Params: []*Param{norm}}, m.embed
	if !cfg.TieWordEmbeddings {
		matrix = newParam("lm_head.weight", cfg.DType, normal, vocabulary, cfg.VocabSize, cfg.HiddenSize)
		last.Params = append(last.Params, matrix)
	}
	m.groups = append(m.groups, last)
	m.head = newHead(cfg, norm, matrix)
	m.inputs, m.stream = make([]tensor.Tensor, len(m.blocks)), make([]tensor.Tensor, len(m.blocks))
	m.orders, m.visits = map[bool][]Use{false: m.order(false), true: m.order(true)}, m.visitsOf()
	if err := m.makeConstants(); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// makeConstants puts what does not change on the device.
func (m *Model) makeConstants() error {
	freq := m.Config.Rope.Frequencies(m.Config.RotaryDim)
	n := int64(len(freq))
	var err error
	if m.constants, err = device.NewArena(m.dev, "constants", device.Padded(m.dev, 4*n)+8); err != nil {
		return err
	}
	if m.freq, err = m.constants.Tensor(tensor.F32, n); err != nil {
		return err
	}
	if m.sum, err = m.constants.Tensor(tensor.F64, 1); err != nil {
		return err
	}
	s, err := m.dev.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	if err := m.dev.Copy(s, m.freq, tensor.OfFloat32(freq, n)); err != nil {
		return err
	}
	return s.Sync()
}

// Close gives the model's own memory back; parameters are their owner's.
func (m *Model) Close() {
	m.off.close()
	if m.constants != nil {
		m.constants.Free()
	}
}

// Groups are the parameters: embed, layer 0 ..., head.
func (m *Model) Groups() []*Group { return m.groups }

// Numel is the number of elements of all parameters, tied ones once.
func (m *Model) Numel() int64 {
	n := int64(0)
	for _, g := range m.groups {
		n += g.Numel()
	}
	return n
}

// Compute is the type of activations and of the weights they meet.
func (m *Model) Compute() tensor.DType { return m.compute }

// ForwardBackward computes the loss of this rank's shard and adds the gradient of GradScale·ΣNLL to
// every Param.Grad: this rank's part, to be summed over ranks. Collective.
func (m *Model) ForwardBackward(c *Ctx, b *Batch) (Loss, error) {
	return m.run("ForwardBackward", c, b, true)
}

// Forward computes the loss alone, in memory that does not grow with the number of layers.
// Collective.
func (m *Model) Forward(c *Ctx, b *Batch) (Loss, error) { return m.run("Forward", c, b, false) }

func (m *Model) run(op string, c *Ctx, b *Batch, backward bool) (loss Loss, err error) {
	defer func() {
		if e := recover(); e != nil {
			err = status.Errorf(status.Internal, "model.%s: %v", op, e)
		}
	}()
	if err := m.check(op, b, backward, c.Weights != nil); err != nil {
		return Loss{}, err
	}
	plans, c1 := &m.plans, m.comm
	if m.isAlone(b.SP) {
		plans, c1 = &m.alone, m.alone.comm
	}
	sizes, err := plans.sizes(m.dev, b.SP.Seq())
	if err != nil {
		return Loss{}, err
	}
	p := &m.pass
	p.begin(m, c, b, b.SP.Rows(), sizes, backward)
	p.plans, p.comm = plans, c1
	defer c.Arena.Reset(c.Arena.Mark())
	if c.Host != nil {
		defer c.Host.Reset(c.Host.Mark())
	}
	if c.Weights != nil {
		p.err = c.Weights.Pass(m.orders[backward])
	}
	m.execute(p)
	p.Copy(tensor.OfFloat64(m.hostSum, 1), m.sum)
	targets := m.hostTargets(p, b.Targets)
	if p.err == nil {
		p.wait()
	}
	if p.err != nil {
		return Loss{}, status.Errorf(status.Of(p.err), "model.%s: %s: %w", op, m.groups[p.at].Name, p.err)
	}
	loss.Sum = m.hostSum[0]
	for _, id := range targets {
		if id >= 0 {
			loss.Tokens++
		}
	}
	return loss, nil
}

// isAlone says whether this rank has a batch whole, though others could share it: nothing is
// exchanged then, and the others need not take part.
func (m *Model) isAlone(b *sp.Batch) bool { return b.Size() == 1 && m.comm.Size() > 1 }

// begin readies the pass, keeping the memory of arguments.
func (p *pass) begin(m *Model, c *Ctx, b *Batch, rows int64, sizes sizes, backward bool) {
	p.dev, p.comm, p.compute, p.c, p.batch, p.rows, p.sizes, p.backward = m.dev, m.comm, m.compute, c, b, rows, sizes, backward
	p.names, p.plans, p.offloader, p.policy = m.groups, &m.plans, &m.off, m.activations.policies()
	p.tiles, p.err, p.at, p.visited, p.saved, p.dry = m.tiles, nil, 0, 0, [categories]int64{}, c.Arena.Sketched()
}

// execute is the whole pass, laid out in memory and run; on a sketched arena laid out alone.
func (m *Model) execute(p *pass) {
	b, hidden, half := p.batch, m.Config.HiddenSize, m.Config.RotaryDim/2
	p.cos, p.sin = p.stat(p.rows, half), p.stat(p.rows, half)
	p.rstd, p.act, p.flow = p.stat(p.rows), p.temp(p.rows, hidden), p.temp(p.rows, hidden)
	m.layStores(p)
	p.phase("rope")
	p.RopeTable(b.Positions, m.freq)
	p.end()

	x := m.before(p, 0) // the residual stream
	p.need(0)
	p.phase("embedding")
	p.Embed(x, b.IDs, m.embed)
	p.inspect("output", "", x)
	p.end()
	p.done(0)
	x = m.forward(p, x)
	last := len(m.groups) - 1
	if m.head.tied {
		p.need(0)
	}
	p.need(last)
	d := m.head.run(p, x, m.sum)
	p.inspect("gradient of its input", "", d)
	p.done(last)
	if m.head.tied {
		p.done(0)
	}
	if !p.backward {
		return
	}
	m.backward(p, d)
	p.need(0)
	p.phase("embedding")
	p.inspect("gradient of its output", "", d)
	p.EmbedBack(d, b.IDs, m.embed)
	p.end()
	p.done(0)
}

// order is the stretches of execute. A tied table is needed before the head's other weights, which
// take little room.
func (m *Model) order(backward bool) []Use {
	last := len(m.groups) - 1
	order := []Use{{0, Reads}}
	for i := range m.blocks {
		order = append(order, Use{1 + i, Reads})
	}
	use := Reads
	if backward {
		use |= Adds
	}
	if m.head.tied {
		order = append(order, Use{0, use})
	}
	order = append(order, Use{last, use})
	if !backward {
		return order
	}
	m.walkBack(func(layer int64, again bool) {
		if again {
			order = append(order, Use{1 + int(layer), Reads})
		} else {
			order = append(order, Use{1 + int(layer), use})
		}
	})
	return append(order, Use{0, Adds})
}

// Idle lends and takes back the weights as Forward does, without a batch: for a rank that has none
// where others have, and weights are shared.
func (m *Model) Idle(c *Ctx) error {
	order := m.orders[false]
	if err := c.Weights.Pass(order); err != nil {
		return err
	}
	for _, x := range order {
		if err := c.Weights.Gather(x.Group, c.Stream); err != nil {
			return err
		}
		if err := c.Weights.Release(x.Group, c.Stream); err != nil {
			return err
		}
	}
	return nil
}

// check looks at what memory safety needs.
func (m *Model) check(op string, b *Batch, backward, lent bool) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "model."+op+": "+format, args...)
	}
	if b.SP.Batch() != 1 {
		return bad("a batch of %d sequences: lay them out as documents of one", b.SP.Batch())
	}
	rows := b.SP.Rows()
	for i, t := range [...]*tensor.Tensor{&b.IDs, &b.Targets, &b.Positions} {
		if t.DType != tensor.I32 || t.NDim != 1 || t.Shape[0] != rows || !t.Contiguous() {
			return bad("%s is %v: I32[%d] is needed, one for each row of this rank", [...]string{"ids", "targets", "positions"}[i], *t, rows)
		}
	}
	place := m.dev.Info().Place
	for i, t := range [...]*tensor.Tensor{&b.IDs, &b.Targets, &b.Positions} {
		if t.Where != place && rows > 0 {
			return bad("%s lie in the memory of another device than the weights: copy them there", [...]string{"ids", "targets", "positions"}[i])
		}
	}
	if lent {
		return nil
	}
	for _, g := range m.groups {
		if p := g.Params[0]; p.Value.IsNil() || backward && p.Grad.IsNil() {
			return bad("group %s has no memory for its values or gradients: Bind it", g.Name)
		}
	}
	return nil
}

// hostTargets is the targets where the host can read them, once the stream has come past.
func (m *Model) hostTargets(p *pass, t tensor.Tensor) []int32 {
	if t.Where == tensor.Host {
		return t.Int32s()
	}
	n := t.Numel()
	if int64(len(m.targets)) < n {
		m.targets = make([]int32, n)
	}
	p.Copy(tensor.OfInt32(m.targets[:n], n), t)
	return m.targets[:n]
}
