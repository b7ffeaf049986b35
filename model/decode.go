package model

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Decoder computes the logits of a sequence that grows, on one rank. It keeps the keys and values
// of softmax attention (KV cache) and the recurrent states of linear attention, so a token costs
// one pass over the weights and over the cache. NewDecoder allocates all memory.
type Decoder struct {
	m       *Model
	ctx     Ctx
	kept    *device.Arena // caches
	work    *device.Arena
	caches  []cache // by layer
	most    int64   // tokens of a pass
	limit   int64   // tokens of the sequence
	length  int64   // tokens so far
	ids     tensor.Tensor
	at      tensor.Tensor // positions
	logits  tensor.Tensor // [1, V] F32
	host    []float32     // logits
	numbers []int32       // ids, then positions, on the host
	stage   Stage
	hidden  hidden
	batch   Batch
}

// cache is what a layer keeps of the tokens so far.
type cache struct {
	k, v     tensor.Tensor // [limit, Hkv, D], keys after their rotation
	raw      tensor.Tensor // [W - 1, C], the last inputs of the convolution
	state    tensor.Tensor // [1, Hv, Dk, Dv] F32
	newState tensor.Tensor // [1, Hv, Dk, Dv] F32
}

// cachedMixer is a mixer of a Decoder. decode overwrites x [n, hidden], of tokens that follow the
// at tokens in the cache, with its output, and adds these tokens to the cache.
type cachedMixer interface {
	newCache(d *Decoder) (cache, error)
	decode(p *pass, c *cache, at int64, x tensor.Tensor)
}

// NewDecoder returns a Decoder for a sequence of at most limit tokens, of which a pass takes at
// most `most`. The parameters of the model are attached, and the model has one rank. With a RoPE
// that switches or scales with the length, all positions are rotated as in a sequence of limit
// tokens.
func (m *Model) NewDecoder(limit, most int64) (d *Decoder, err error) {
	return m.NewStage(limit, most, Stage{Last: int64(len(m.blocks))})
}

// NewStage returns the Decoder of one of several ranks, each of which has some of the layers. The
// parameters that Uses names are attached. Every rank calls Append with the same tokens; only the
// last stage has logits.
func (m *Model) NewStage(limit, most int64, stage Stage) (d *Decoder, err error) {
	if m.comm.Size() != 1 {
		return nil, status.Errorf(status.Unsupported, "model.NewDecoder: the model has %d ranks; decode on one",
			m.comm.Size())
	}
	most = min(most, limit)
	d = &Decoder{m: m, stage: stage, limit: limit, most: most, host: make([]float32, m.Config.VocabSize),
		numbers: make([]int32, 2*most), caches: make([]cache, len(m.blocks))}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	d.kept = device.Sketch(m.dev, "cache")
	if err = d.allocate(); err != nil {
		return d, err
	}
	bytes := d.kept.Peak()
	if d.kept, err = device.NewArena(m.dev, fmt.Sprintf("the cache of %d tokens", limit), bytes); err != nil {
		return d, err
	}
	if err = d.allocate(); err != nil {
		return d, err
	}
	d.work = device.Sketch(m.dev, "decoder")
	d.ctx.Arena = d.work
	// the workspace of attention depends on queries and keys
	for _, x := range [][2]int64{{most, 0}, {most, limit - most}, {1, limit - 1}} {
		if err = d.run(x[0], x[1]); err != nil {
			return d, err
		}
	}
	if d.work, err = device.NewArena(m.dev, "a pass of the decoder", d.work.Peak()); err != nil {
		return d, err
	}
	d.ctx.Arena = d.work
	if d.ctx.Stream, err = m.dev.NewStream(); err != nil {
		return d, err
	}
	return d, d.Reset()
}

// allocate allocates the caches and the inputs.
func (d *Decoder) allocate() (err error) {
	if err = d.allocateHidden(d.kept); err != nil {
		return err
	}
	for i, b := range d.m.blocks[:d.stage.Last] {
		if int64(i) < d.stage.First {
			continue
		}
		if d.caches[i], err = b.mixer.(cachedMixer).newCache(d); err != nil {
			return err
		}
	}
	for _, x := range []struct {
		to    *tensor.Tensor
		dtype tensor.DType
		shape []int64
	}{{&d.ids, tensor.I32, []int64{d.most}}, {&d.at, tensor.I32, []int64{d.most}},
		{&d.logits, tensor.F32, []int64{1, d.m.Config.VocabSize}}} {
		if *x.to, err = d.kept.Tensor(x.dtype, x.shape...); err != nil {
			return err
		}
	}
	return nil
}

// Reset begins a new sequence.
func (d *Decoder) Reset() error {
	d.length = 0
	for i := range d.caches {
		for _, t := range []tensor.Tensor{d.caches[i].raw, d.caches[i].state} {
			if t.IsNil() {
				continue
			}
			if err := d.m.dev.Fill(d.ctx.Stream, t, 0); err != nil {
				return err
			}
		}
	}
	return d.ctx.Stream.Sync()
}

// Bytes returns the memory of the caches and of a pass.
func (d *Decoder) Bytes() int64 { return d.kept.Bytes() + d.work.Bytes() }

// Length returns the number of tokens of the sequence so far.
func (d *Decoder) Length() int64 { return d.length }

// Append adds tokens to the sequence and returns the logits after the last one, which are valid
// until the next call: logits[v] is of token v.
func (d *Decoder) Append(ids []int32) ([]float32, error) {
	if len(ids) == 0 {
		return nil, status.Errorf(status.InvalidArgument,
			"model.Append: no tokens; a sequence begins with at least one")
	}
	if int64(len(ids)) > d.limit-d.length {
		return nil, status.Errorf(status.InvalidArgument,
			"model.Append: %d tokens after %d; the decoder was made for %d", len(ids), d.length, d.limit)
	}
	for _, id := range ids {
		if id < 0 || int64(id) >= d.m.Config.VocabSize {
			return nil, status.Errorf(status.InvalidArgument, "model.Append: token %d; the vocabulary has %d", id,
				d.m.Config.VocabSize)
		}
	}
	for len(ids) > 0 {
		n := min(int64(len(ids)), d.most)
		if err := d.append(ids[:n]); err != nil {
			return nil, err
		}
		ids = ids[n:]
	}
	return d.host, nil
}

func (d *Decoder) append(ids []int32) error {
	n, s := int64(len(ids)), d.ctx.Stream
	tokens, positions := d.numbers[:n], d.numbers[d.most:d.most+n]
	copy(tokens, ids)
	for i := range positions {
		positions[i] = int32(d.length) + int32(i)
	}
	err := d.m.dev.Copy(s, d.ids.Slice(0, 0, n), tensor.OfInt32(tokens, n))
	if err == nil {
		err = d.m.dev.Copy(s, d.at.Slice(0, 0, n), tensor.OfInt32(positions, n))
	}
	if err == nil {
		err = d.receive(n)
	}
	if err == nil {
		err = d.run(n, d.length)
	}
	if err == nil {
		err = d.send(n)
	}
	if err != nil {
		return status.Errorf(status.Of(err), "model.Append: %w", err)
	}
	d.length += n
	if c := d.m.Config.LogitSoftcap; c > 0 && d.isLast() {
		for i, x := range d.host {
			d.host[i] = float32(c * math.Tanh(float64(x)/c))
		}
	}
	for i := range d.caches {
		c := &d.caches[i]
		c.state, c.newState = c.newState, c.state
	}
	return nil
}

// run enqueues the pass of n tokens after `at` tokens. On a sketched arena it only counts memory.
func (d *Decoder) run(n, at int64) error {
	m, p := d.m, &d.m.pass
	d.batch = Batch{IDs: d.ids.Slice(0, 0, n), Positions: d.at.Slice(0, 0, n), Length: d.limit}
	p.begin(m, &d.ctx, &d.batch, n, sizes{}, false)
	p.plans = &m.alone
	defer d.work.Reset(d.work.Mark())
	p.passBuffers.allocate(&p.executor, n, m.Config)
	m.bias.upload(p, m)
	for k := range m.rotations {
		if r := &m.rotations[k]; r.rope != nil {
			r.table(p, &p.tables[k])
		}
	}
	x := p.residualStream
	d.enter(p, x)
	for i, b := range m.blocks[:d.stage.Last] {
		if int64(i) < d.stage.First {
			continue
		}
		p.group = 1 + i
		p.allocateSaved()
		b.visitSaved(p)
		mark := p.mark()
		b.mixerResidual.apply(p, x, x, func(p *pass, x tensor.Tensor) {
			b.mixer.(cachedMixer).decode(p, &d.caches[i], at, x)
		}, &b.mlpResidual)
		b.mlpResidual.applyNormed(p, x, x, b.mlp.Forward, nil)
		p.reset(mark)
	}
	if !d.isLast() {
		d.copyHidden(p, d.hidden.device.Slice(0, 0, n), x)
		return p.err
	}
	p.group = len(m.groups) - 1
	last := x.Slice(0, n-1, n)
	p.Norm(last, last, m.head.norm, p.rstd.Slice(0, 0, 1), m.head.eps)
	p.Scale(last, m.head.scale)
	m.head.matrix.forward(p, d.logits, last)
	return p.err
}

// Close frees the memory.
func (d *Decoder) Close() {
	if d.ctx.Stream != nil {
		d.ctx.Stream.Close()
	}
	for _, a := range []*device.Arena{d.kept, d.work} {
		if a != nil {
			a.Free()
		}
	}
}

func (a *softmaxAttention) decode(p *pass, c *cache, at int64, x tensor.Tensor) {
	n := x.Shape[0]
	mark := p.mark()
	all, mixed := p.temp(n, a.qkv.out), p.temp(n, a.hq*a.d)
	a.qkv.forward(p, all, x)
	qNorm, kNorm := a.qNorm, a.kNorm
	if a.whole {
		allQ, allK := a.normed(all)
		p.Norm(allQ, allQ, qNorm, p.tempF32(n), a.eps)
		p.Norm(allK, allK, kNorm, p.tempF32(n), a.eps)
		qNorm, kNorm = nil, nil
	}
	a.setSinks(p, false)
	a.attendCached(p, c, at, a.heads(all), qNorm, kNorm, a.eps, mixed)
	if a.gated() {
		_, gate, _ := a.splitQK(all)
		p.SigmoidGate(mixed.Split(1, a.hq), mixed.Split(1, a.hq), gate)
	}
	a.out.forward(p, x, mixed)
	p.reset(mark)
}

func (m *linearMixer) newCache(d *Decoder) (c cache, err error) {
	if c.raw, err = d.kept.Tensor(d.m.compute, m.conv.Shape[2]-1, m.channels); err != nil {
		return c, err
	}
	for _, s := range []*tensor.Tensor{&c.state, &c.newState} {
		if *s, err = d.kept.Tensor(tensor.F32, 1, m.hv, m.dk, m.dv); err != nil {
			return c, err
		}
	}
	return c, nil
}

func (m *linearMixer) decode(p *pass, c *cache, at int64, x tensor.Tensor) {
	n, documents := x.Shape[0], []int64{0, x.Shape[0]}
	mark := p.mark()
	all, y, mixed := p.temp(n, m.in.out), p.temp(n, m.channels), p.temp(n, m.hv*m.dv)
	g, beta, rstd := p.tempF32(n, m.hv), p.tempF32(n, m.hv), p.tempF32(n*m.hv)
	m.in.forward(p, all, x)
	qkv, b, a, z := m.split(all)
	if !p.skip() {
		p.err = p.dev.Conv1dForward(p.ctx.Stream,
			&device.Conv1d{X: qkv, Y: y, W: m.matrix(m.conv.Value), Before: c.raw, Cu: documents})
	}
	c.keep(p, qkv)
	if !p.skip() {
		p.err = p.dev.DeltaGatesForward(p.ctx.Stream,
			&device.DeltaGates{A: a, B: b, ALog: m.aLog.Value, DtBias: m.dtBias.Value, G: g, Beta: beta})
	}
	keys := m.hk * m.dk
	rule := device.GatedDelta{Q: y.Slice(1, 0, keys).Split(1, m.hk), K: y.Slice(1, keys, 2*keys).Split(1, m.hk),
		V: y.Slice(1, 2*keys, m.channels).Split(1, m.hv), Out: mixed.Split(1, m.hv), G: g, Beta: beta, Cu: documents,
		L2Norm: true, Scale: 1 / math.Sqrt(float64(m.dk)), StateIn: c.state, StateOut: c.newState}
	rule.Workspace = p.alloc(tensor.U8, p.dev.GatedDeltaSizes(&rule).Forward)
	if !p.skip() {
		p.err = p.dev.GatedDeltaForward(p.ctx.Stream, &rule)
	}
	m.project(p, x, mixed, z, rstd, y.Slice(1, 0, m.hv*m.dv))
	p.reset(mark)
}

// keep keeps the last inputs of the convolution: of x [n, C] and, if it has fewer tokens than the
// convolution reads, of the inputs before.
func (c *cache) keep(p *pass, x tensor.Tensor) {
	n, width := x.Shape[0], c.raw.Shape[0]
	if n >= width {
		p.Copy(c.raw, x.Slice(0, n-width, n))
		return
	}
	older := p.temp(width-n, x.Shape[1]) // source and destination of a copy must not overlap
	p.Copy(older, c.raw.Slice(0, n, width))
	p.Copy(c.raw.Slice(0, 0, width-n), older)
	p.Copy(c.raw.Slice(0, width-n, width), x)
}
