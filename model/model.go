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

// Model is a decoder on one rank: the names and shapes of its parameters, and the passes. The
// caller owns the memory of the parameters (Group.Bind). A model runs one pass at a time.
type Model struct {
	Config *Config

	dev    device.Device
	comm   comm.Comm // of the ranks that share each sequence
	plans  plans
	alone  plans // of a communicator of one rank, for batches that are not shared
	groups []*Group
	embed  *Param // [V, hidden]
	blocks []*block
	head   *head
	orders map[bool][]Use // uses of groups in passes with and without a backward half

	tiles       Tiles
	activations Activations
	visits      []int64         // layers in the order of the backward half
	inputs      []tensor.Tensor // [T, hidden] of each segment
	stream      []tensor.Tensor // [T, hidden] input of each layer of the current segment
	layerKinds  []int           // see kinds
	off         offloader

	compute   tensor.DType // of activations and of the weights in matrix products
	ring      int64        // groups of ranks in the ring of attention
	constants *device.Arena
	rotations [masks]rotation
	scale     float64       // of embeddings
	lora      *LoRA         // nil = no adapters
	folder    *Folder       // see KeepFolder; nil = none
	sum       tensor.Tensor // [1] F64, of the loss
	hostSum   []float64
	targets   []int32 // of the current batch, in host memory
	pass      pass
	balancing balancing
	bias      expertBias

	expertRanks comm.Comm // that the experts are divided among; nil = each rank has all
	most        []int64   // [1]
	nothing     Batch
}

// Options are settings that are not in a configuration.
type Options struct {
	// Compute is the type of activations and weights: F32, or another type that the device computes
	// in. Sums, statistics, logits and gradients of weights are always F32. 0 = F32.
	Compute  tensor.DType
	Strategy gdn.Strategy // of linear layers
	Tokens   int64        // of a batch, by which Strategy Auto chooses; 0 = unknown
	Ring     int64        // groups of ranks in the ring of attention (sp.Layer); 0 = 1
	Gather   bool         // keys move between the groups in one all-to-all (sp.Layer)
	Freeze   []string     // patterns of names of frozen parameters; see ParsePatterns
	LoRA     *LoRA        // nil = no adapters; otherwise the adapters alone are trained
	// Experts are the ranks that the experts of each layer are divided among; nil = each rank has
	// all. They need not be ranks of one sequence, but they run the same passes: all of them call
	// ForwardBackward, or all of them Forward or Idle.
	Experts comm.Comm
	// MoveBiases says that training moves the biases of the experts (Config.Experts.Biased).
	MoveBiases bool
	// Overlap sends each of q, k and v while the next one is projected, and their gradients while
	// gradients of weights are computed (sp.Overlap). Results are bitwise the same.
	Overlap bool
}

// New returns a model on the ranks of c, which share each sequence. Collective: if the device does
// not support the configuration, all ranks return the same error.
func New(d device.Device, c comm.Comm, cfg *Config, o Options) (*Model, error) {
	if o.Compute == tensor.Invalid {
		o.Compute = tensor.F32
	}
	m := &Model{Config: cfg, dev: d, comm: c, compute: o.Compute, ring: max(1, o.Ring), hostSum: make([]float64, 1),
		most: make([]int64, 1), scale: cfg.embeddingScale(o.Compute), lora: o.LoRA}
	m.bias.make(cfg, o.MoveBiases)
	m.SetSequences(1)
	if err := m.plans.make(d, c, cfg, o); err != nil {
		return nil, err
	}
	o.Ring = 1
	if err := m.alone.make(d, comm.Local(1)[0], cfg, o); err != nil {
		return nil, err
	}
	m.makeGroups()
	if err := m.freeze(o); err != nil {
		m.Close()
		return nil, err
	}
	if err := m.divideExperts(o.Experts); err != nil {
		m.Close()
		return nil, err
	}
	m.inputs, m.stream = make([]tensor.Tensor, len(m.blocks)), make([]tensor.Tensor, len(m.blocks))
	m.orders, m.visits = map[bool][]Use{false: m.order(false), true: m.order(true)}, m.backwardOrder()
	if err := m.makeConstants(); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// makeGroups makes the parameters and the layers that have them.
func (m *Model) makeGroups() {
	cfg := m.Config
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
}

// BatchSpec returns the batch of one sequence for the ranks of the model. Tokens are in the chunks
// of a zigzag if all layers are softmax attention; the recurrent states of linear attention need
// them in order.
func (m *Model) BatchSpec(seq int64, documents []int64) sp.BatchSpec {
	return sp.BatchSpec{Batch: 1, Seq: seq, CuSeqlens: documents, Ring: m.ring, Zigzag: m.zigzag()}
}

func (m *Model) zigzag() bool { return m.ring > 1 && m.plans.linear == nil }

// MostTokens returns the largest number of tokens of a rank in a sequence.
func (m *Model) MostTokens(seq int64) int64 {
	return sp.MostRows(seq, int64(m.comm.Size()), m.ring, m.zigzag())
}

// makeConstants allocates and fills the model's constants on the device.
func (m *Model) makeConstants() error {
	n, sets := m.Config.RotaryDim/2, int64(1)
	if m.Config.LocalRope != nil {
		sets = 2
	}
	var err error
	if m.constants, err = device.NewArena(m.dev, "constants", sets*device.Padded(m.dev, 4*n)+8); err != nil {
		return err
	}
	s, err := m.dev.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	for k, rope := range [masks]*Rope{fullMask: &m.Config.Rope, slidingMask: m.Config.LocalRope} {
		if rope == nil {
			continue
		}
		r := newRotation(rope, m.Config.RotaryDim)
		if r.freq, err = m.constants.Tensor(tensor.F32, n); err != nil {
			return err
		}
		if err := m.dev.Copy(s, r.freq, tensor.OfFloat32(r.frequencies, n)); err != nil {
			return err
		}
		m.rotations[k] = r
	}
	if m.sum, err = m.constants.Tensor(tensor.F64, 1); err != nil {
		return err
	}
	return s.Sync()
}

// Close frees the model's own memory. The memory of the parameters belongs to the caller.
func (m *Model) Close() {
	m.off.close()
	if m.constants != nil {
		m.constants.Free()
	}
}

// Groups returns the parameters: embed, layer 0 ..., head.
func (m *Model) Groups() []*Group { return m.groups }

// Numel returns the number of elements of all parameters. Tied parameters count once.
func (m *Model) Numel() int64 {
	n := int64(0)
	for _, g := range m.groups {
		n += g.Numel()
	}
	return n
}

// Compute returns the type of activations and of the weights in matrix products.
func (m *Model) Compute() tensor.DType { return m.compute }

// ForwardBackward returns the loss of this rank's shard, and adds the gradient of GradScale·ΣNLL of
// the shard to every Param.Grad. The caller sums gradients over the ranks. Collective.
func (m *Model) ForwardBackward(c *Ctx, b *Batch) (Loss, error) {
	return m.run("ForwardBackward", c, b, true)
}

// Forward returns the loss only. Its memory does not depend on the number of layers. Collective.
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
	if p.err = m.agreeTokens(p); p.err == nil && c.Weights != nil {
		p.err = c.Weights.Pass(m.orders[backward])
	}
	m.execute(p)
	p.Copy(tensor.OfFloat64(m.hostSum, 1), m.sum)
	p.balance.read(p, m)
	targets := m.hostTargets(p, b.Targets)
	if p.err == nil {
		p.wait(p.comm)
	}
	if p.err != nil {
		return Loss{}, status.Errorf(status.Of(p.err), "model.%s: %s: %w", op, m.groups[p.group].Name, p.err)
	}
	loss.Sum, loss.Balance = m.hostSum[0], p.balance.total(m)
	for _, id := range targets {
		if id >= 0 {
			loss.Tokens++
		}
	}
	return loss, nil
}

// isAlone reports whether this rank has all of a batch although the communicator has more ranks.
// Then the pass is not collective.
func (m *Model) isAlone(b *sp.Batch) bool { return b.Size() == 1 && m.comm.Size() > 1 }

// execute allocates the memory of a pass and enqueues its operations. On a sketched arena it only
// counts memory.
func (m *Model) execute(p *pass) {
	b := p.batch
	p.passBuffers.allocate(&p.executor, p.tokens, m.Config)
	m.allocateStores(p)
	m.bias.upload(p, m)
	p.balance.begin(p, m)
	p.phase("rope")
	for k := range m.rotations {
		if r := &m.rotations[k]; r.rope != nil {
			r.table(p, &p.tables[k])
		}
	}
	p.end()

	x := m.inputOf(p, 0) // the residual stream
	p.gather(0)
	p.phase("embedding")
	p.Embed(x, b.IDs, m.embed)
	p.Scale(x, m.scale)
	p.inspect("output", "", x)
	p.end()
	p.release(0)
	x = m.forward(p, x)
	p.balance.share(p)
	last := len(m.groups) - 1
	if m.head.tied {
		p.gather(0)
	}
	p.gather(last)
	d := m.head.run(p, x, m.sum)
	p.inspect("gradient of its input", "", d)
	p.release(last)
	if m.head.tied {
		p.release(0)
	}
	if !p.backward {
		return
	}
	m.backward(p, d)
	if m.embed.Frozen {
		return
	}
	p.gather(0)
	p.phase("embedding")
	p.inspect("gradient of its output", "", d)
	p.Scale(d, m.scale)
	p.EmbedBack(d, b.IDs, m.embed)
	p.end()
	p.release(0)
}

// order returns the uses of groups in execute. A tied table is gathered before the head's other
// weights, which are small.
func (m *Model) order(backward bool) []Use {
	last := len(m.groups) - 1
	order := []Use{{0, Reads}}
	for i := range m.blocks {
		order = append(order, Use{1 + i, Reads})
	}
	use := func(group int) Use {
		if backward && m.groups[group].trains() {
			return Use{group, Reads | Adds}
		}
		return Use{group, Reads}
	}
	if m.head.tied {
		order = append(order, use(0))
	}
	order = append(order, use(last))
	if !backward {
		return order
	}
	m.visitBackward(func(layer int64, again bool) {
		if again {
			order = append(order, Use{1 + int(layer), Reads})
		} else {
			order = append(order, use(1+int(layer)))
		}
	})
	if m.embed.Frozen {
		return order
	}
	return append(order, Use{0, Adds})
}

// Idle gathers and releases the weights in the order of Forward, without a batch, and computes the
// experts of this rank for tokens of other ranks. A rank without a batch calls it while others call
// Forward, because both are collective.
func (m *Model) Idle(c *Ctx) error {
	p := &m.pass
	p.begin(m, c, &m.nothing, 0, sizes{}, false)
	defer c.Arena.Reset(c.Arena.Mark())
	if p.err = m.agreeTokens(p); p.err == nil {
		p.err = c.Weights.Pass(m.orders[false])
	}
	none := p.temp(0, m.Config.HiddenSize)
	for _, x := range m.orders[false] {
		p.gather(x.Group)
		if i := x.Group - 1; i >= 0 && i < len(m.blocks) {
			if e, ok := m.blocks[i].mlp.(*experts); ok && e.remote != nil {
				e.Forward(p, none)
			}
		}
		p.release(x.Group)
	}
	if p.err != nil {
		return status.Errorf(status.Of(p.err), "model.Idle: %s: %w", m.groups[p.group].Name, p.err)
	}
	return nil
}

// agreeTokens sets the largest number of tokens of the ranks among which experts are divided.
// Collective over them.
func (m *Model) agreeTokens(p *pass) error {
	if m.expertRanks == nil {
		return nil
	}
	m.most[0] = p.tokens
	err := m.expertRanks.AllReduce(nil, tensor.OfInt64(m.most, 1), comm.Max)
	p.expertTokens = m.most[0]
	return err
}

// ExpertBytesSent returns the bytes that this rank has sent in the last pass to experts of other
// ranks, and back.
func (m *Model) ExpertBytesSent() int64 { return m.pass.expertBytes }

// check checks what memory safety needs. With gathered, Ctx.Weights attaches the parameters.
func (m *Model) check(op string, b *Batch, backward, gathered bool) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "model."+op+": "+format, args...)
	}
	if b.SP.Batch() != 1 {
		return bad("the batch has %d sequences; pack them as documents of one sequence", b.SP.Batch())
	}
	tokens := b.SP.Rows()
	for i, t := range [...]*tensor.Tensor{&b.IDs, &b.Targets, &b.Positions} {
		if t.DType != tensor.I32 || t.NDim != 1 || t.Shape[0] != tokens || !t.Contiguous() {
			return bad("%s is %v; it must be I32[%d], one for each token of this rank",
				[...]string{"ids", "targets", "positions"}[i], *t, tokens)
		}
	}
	place := m.dev.Info().Place
	for i, t := range [...]*tensor.Tensor{&b.IDs, &b.Targets, &b.Positions} {
		if t.Where != place && tokens > 0 {
			return bad("%s are on another device than the weights; copy them to the device of the weights",
				[...]string{"ids", "targets", "positions"}[i])
		}
	}
	if m.Config.Switches() && b.Length < 1 {
		return bad("the length is %d; RoPE chooses its frequencies by the longest document of the batch, so set Length",
			b.Length)
	}
	if backward && m.CountsExperts() {
		if err := m.checkSequences(op, b, tokens); err != nil {
			return err
		}
	}
	if gathered {
		return nil
	}
	for _, g := range m.groups {
		for _, p := range g.Params {
			if p.Value.IsNil() || backward && !p.Frozen && p.Grad.IsNil() {
				return bad("%s of group %s has no memory for values or gradients; call Bind", p.Name, g.Name)
			}
		}
	}
	return nil
}

// hostTargets returns the targets in host memory. They are valid once the stream has run.
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
