package model

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"ulysses/device"
	"ulysses/internal/input"
	"ulysses/internal/splitmix"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// AllLinear is the target that stands for all matrices of the layers.
const AllLinear = "all-linear"

// LoRA has the settings of low-rank adapters (Hu et al. 2021, arXiv:2106.09685), as PEFT defines
// them. A matrix W that is a target computes y = W·x + b + scale·B·(A·x). A [rank, in] and B
// [out, rank] are trained, and all other parameters are frozen. B begins as 0, so the first loss is
// that of the model without adapters.
type LoRA struct {
	Rank  int64
	Alpha float64
	// RSLoRA makes the scale alpha/√rank (Kalajdzievski 2023, arXiv:2312.03732), not alpha/rank.
	RSLoRA bool
	// Dropout is the probability that an element of an adapter's x becomes 0 in training: y = W·x +
	// b + scale·B·(A·dropout(x)). Each adapter chooses for itself.
	Dropout float64
	// Targets are names of matrices: AllLinear, or the end of a module's path, from a dot on.
	Targets []string
}

// Scale returns the factor of B·A.
func (l *LoRA) Scale() float64 {
	if l.RSLoRA {
		return l.Alpha / math.Sqrt(float64(l.Rank))
	}
	return l.Alpha / float64(l.Rank)
}

// adapter is the pair of low-rank matrices beside a matrix W [out, in]. The parts of a matrix that
// is fused in the files share one pair, of which each has its rows of B.
type adapter struct {
	a, b    *Param // [rank, in], [rows of the matrix in the files, rank]
	at, out int64  // the first row of B, and the number of rows
	rank    int64
	scale   float64
	dropout float64
	number  int64 // among the adapters of the model; each has other random bits
}

const (
	loraA = ".lora_A.weight"
	loraB = ".lora_B.weight"
)

// module returns the path of the module that has a weight.
func module(name string) string { return strings.TrimSuffix(name, ".weight") }

// adapts reports whether a target is, or ends, the path of a module.
func adapts(target, module string) bool {
	return target == AllLinear || target == module || strings.HasSuffix(module, "."+target)
}

// isAdapter reports whether the parameter is a matrix of an adapter.
func (p *Param) isAdapter() bool {
	return strings.HasSuffix(p.Name, loraA) || strings.HasSuffix(p.Name, loraB)
}

// addAdapters adds adapters to the matrices of the layers that are targets.
func (m *Model) addAdapters(l *LoRA) error {
	m.leaveOutMisread()
	if err := m.refuseExpertTargets(l.Targets); err != nil {
		return err
	}
	used, count := make([]bool, len(l.Targets)), int64(0)
	for _, g := range m.groups[1 : len(m.groups)-1] {
		var added []*Param
		modules := map[string]*adapter{}
		for _, w := range g.Params {
			path, at, rows := m.Config.moduleInFiles(w.Name)
			target := false
			for i, t := range l.Targets {
				if w.matrix && adapts(t, path) {
					target, used[i] = true, true
				} else if w.matrix && adapts(t, module(w.Name)) {
					return status.Errorf(status.InvalidConfig,
						"lora.targets: %q is a part of %s in the files of this model, for which PEFT has one adapter; name %s",
						t, input.Short(path), path[strings.LastIndex(path, ".")+1:])
				}
			}
			if !target {
				continue
			}
			x := &adapter{rank: l.Rank, scale: l.Scale(), dropout: l.Dropout, at: at, out: w.Shape[0]}
			if of := modules[path]; of == nil {
				axes := func(i int) []string { return []string{"lora.rank", w.axes[i]} }
				x.a = newParam(path+loraA, tensor.F32, kaiming, axes(1), l.Rank, w.Shape[1])
				x.b = newParam(path+loraB, tensor.F32, zeros, axes(0), cmp.Or(rows, w.Shape[0]), l.Rank)
				x.number = count
				count++
				added = append(added, x.a, x.b)
				modules[path] = x
			} else {
				x.a, x.b, x.number = of.a, of.b, of.number
			}
			w.adapter = x
		}
		g.Params = append(g.Params, added...)
	}
	i := slices.Index(used, false)
	if i < 0 {
		return nil
	}
	return status.Errorf(status.InvalidConfig, "lora.targets: %s; name matrices of the layers (%s), or %q",
		m.unadapted(l.Targets[i]), strings.Join(m.adaptable(), ", "), AllLinear)
}

// adaptable returns the names of the matrices of the layers that can have adapters.
func (m *Model) adaptable() []string {
	var paths []string
	for _, g := range m.groups[1 : len(m.groups)-1] {
		for _, w := range g.Params {
			if w.matrix {
				path, _, _ := m.Config.moduleInFiles(w.Name)
				paths = append(paths, path)
			}
		}
	}
	return moduleNames(paths)
}

// unadapted says why a target matches no matrix of the layers.
func (m *Model) unadapted(target string) string {
	for _, g := range m.groups {
		for _, p := range g.Params {
			if adapts(target, module(p.Name)) {
				return notOfALayer(module(p.Name))
			}
		}
	}
	return fmt.Sprintf("%q matches no module of the model", target)
}

// rows returns the adapter's rows of B, or of its gradient. A dry run has neither.
func (x *adapter) rows(b tensor.Tensor) tensor.Tensor {
	if b.IsNil() {
		return b
	}
	return b.Slice(0, x.at, x.at+x.out)
}

// drop computes y = dropout(x), or with add adds it to y. x and y are [T, in].
func (x *adapter) drop(p *pass, y, in tensor.Tensor, add bool) {
	if p.skip() {
		return
	}
	p.dropout = device.Dropout{X: in, Y: y, Tokens: p.batch.Numbers.Slice(0, p.first, p.first+in.Shape[0]),
		P: x.dropout, Add: add,
		Seed: int64(splitmix.Mix(splitmix.Mix(uint64(p.batch.Seed)) + uint64(x.number)))}
	p.err = p.dev.Dropout(p.ctx.Stream, &p.dropout)
}

// drops reports whether the pass has dropout, which an evaluation has not.
func (x *adapter) drops(p *pass) bool { return x.dropout > 0 && p.backward }

// input returns dropout(x) in temporary memory, or x if the pass has no dropout.
func (x *adapter) input(p *pass, in tensor.Tensor) tensor.Tensor {
	if !x.drops(p) {
		return in
	}
	y := p.temp(in.Dims()...)
	x.drop(p, y, in, false)
	return y
}

// hidden computes u [T, rank] = scale·A·x from x [T, in], after dropout.
func (x *adapter) hidden(p *pass, u, in tensor.Tensor) {
	p.Gemm(u, in, x.a.Value.Permute(1, 0), tensor.Tensor{})
	p.Scale(u, x.scale)
}

// gradOfHidden computes the gradient du [T, rank] of A·x from dy [T, out].
func (x *adapter) gradOfHidden(p *pass, du, dy tensor.Tensor) {
	p.Gemm(du, dy, x.rows(x.b.Value), tensor.Tensor{})
	p.Scale(du, x.scale)
}

// forward adds scale·B·A·x to y [T, out].
func (x *adapter) forward(p *pass, y, in tensor.Tensor) {
	mark := p.mark()
	u := p.temp(in.Shape[0], x.rank)
	x.hidden(p, u, x.input(p, in))
	p.GemmAdd(y, u, x.rows(x.b.Value).Permute(1, 0))
	p.reset(mark)
}

// addWeights adds to the gradients of A and B. It computes dropout(x) and A·x again, which costs
// less than to save them.
func (x *adapter) addWeights(p *pass, dy, in tensor.Tensor) {
	mark := p.mark()
	u := p.temp(in.Shape[0], x.rank)
	in = x.input(p, in)
	x.hidden(p, u, in)
	p.GemmAdd(x.rows(x.b.Grad), dy.Permute(1, 0), u)
	x.gradOfHidden(p, u, dy)
	p.GemmAdd(x.a.Grad, u.Permute(1, 0), in)
	p.reset(mark)
}

// backwardInput adds to dx [T, in] the gradient that passes through the adapter.
func (x *adapter) backwardInput(p *pass, dx, dy tensor.Tensor) {
	mark := p.mark()
	u := p.temp(dx.Shape[0], x.rank)
	x.gradOfHidden(p, u, dy)
	if x.drops(p) {
		d := p.temp(dx.Dims()...)
		p.Gemm(d, u, x.a.Value, tensor.Tensor{})
		x.drop(p, dx, d, true)
	} else {
		p.GemmAdd(dx, u, x.a.Value)
	}
	p.reset(mark)
}

// adapters calls do for each adapter of the projections, with its columns of y. Neighbouring parts
// of a fused matrix are one.
func (l *linear) adapters(y tensor.Tensor, do func(x adapter, y tensor.Tensor)) {
	at := int64(0)
	for i := 0; i < len(l.w); {
		if l.w[i].adapter == nil {
			at += l.w[i].Shape[0]
			i++
			continue
		}
		x := *l.w[i].adapter
		for i++; i < len(l.w) && l.w[i].adapter != nil && l.w[i].adapter.a == x.a; i++ {
			x.out += l.w[i].adapter.out
		}
		do(x, y.Slice(1, at, at+x.out))
		at += x.out
	}
}

// sketch allocates, in a dry run, what the calls of forward, addWeights and backwardInput for some
// tokens allocate. A tiled computation does not make these calls in a dry run.
func (l *linear) sketch(p *pass, tokens int64) {
	if !p.dry {
		return
	}
	x, y := tensor.Of(nil, p.compute, tokens, l.in), tensor.Of(nil, p.compute, tokens, l.out)
	l.adapters(y, func(a adapter, y tensor.Tensor) {
		a.forward(p, y, x)
		a.addWeights(p, y, x)
		a.backwardInput(p, x, y)
	})
}

// Drops reports whether training passes have dropout of adapters, and need Batch.Numbers.
func (m *Model) Drops() bool { return m.lora != nil && m.lora.Dropout > 0 }

// InitAdapters initializes the elements of adapters that this rank owns: A by a uniform
// distribution on ±1/√in, B as 0. Init includes it.
func (m *Model) InitAdapters(seed uint64) error { return m.init(seed, (*Param).isAdapter) }
