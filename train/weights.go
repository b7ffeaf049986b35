package train

import (
	"math"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Weights is what the trainer needs of whoever holds the parameters; model.Weights is the model's side of it. Replicated (ZeRO stage 0)
// is the simplest one: every rank holds everything, gradients are summed over all ranks after the last micro step. Rajbhandari et al. 2020.
type Weights interface {
	model.Weights
	// Begin starts an optimizer step of so many micro steps: gradients are zero.
	Begin(s device.Stream, micros int64) error
	// Reduce completes the gradients: after it every rank sees the gradient of the global loss. It returns its Euclidean norm.
	Reduce(s device.Stream) (norm float64, err error)
	// Update takes the optimizer's step t ≥ 1 with the gradient times scale.
	Update(s device.Stream, lr, scale float64, t int64) error
	// Components is the memory held, for the table.
	Components() []model.Component
}

// Replicated holds the parameters, their gradients and the optimizer's moments whole on every rank, each in one flat buffer, so that the
// reduction is one call and so is the optimizer's step. Parameters lie in the order of the groups.
type Replicated struct {
	dev     device.Device
	world   comm.Comm
	opt     *OptimizerConfig
	compute tensor.DType
	params  []*model.Param
	index   map[*model.Param]int
	decay   []device.Range // where the weight decay applies; nil would be everywhere
	ready   []int64        // how often GradReady came for each parameter in this step
	micros  int64

	values       tensor.Tensor // [numel] of the compute type
	masters      tensor.Tensor // [numel] F32, when training in another type
	grads, m, v  tensor.Tensor // [numel] F32; m, v for adamw alone
	sum, hostSum tensor.Tensor // F64 [1]
	buffers      []*device.Arena
	adamw        device.AdamW // arguments, kept so that no step allocates
	sgd          device.SGD
}

// NewReplicated allocates and binds the parameters of the groups, whose values have the compute type.
func NewReplicated(d device.Device, world comm.Comm, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig) (*Replicated, error) {
	w := &Replicated{dev: d, world: world, opt: opt, compute: compute, index: map[*model.Param]int{}, decay: []device.Range{},
		hostSum: tensor.OfFloat64(make([]float64, 1), 1)}
	n := int64(0)
	for _, g := range groups {
		n += g.Numel()
	}
	var table []model.Component
	for _, b := range w.plan(n) {
		table = append(table, model.Component{Name: b.name, Bytes: b.numel * b.dtype.Size()})
	}
	if err := fits(d, table); err != nil {
		return nil, err
	}
	for _, b := range w.plan(n) {
		a, err := device.NewArena(d, b.name, b.numel*b.dtype.Size())
		if err != nil {
			w.Free()
			return nil, err
		}
		w.buffers = append(w.buffers, a)
		if *b.tensor, err = a.Tensor(b.dtype, b.numel); err != nil {
			return nil, err
		}
	}
	at := int64(0)
	for _, g := range groups {
		hi := at + g.Numel()
		part := func(all tensor.Tensor) tensor.Tensor {
			if all.IsNil() {
				return all
			}
			return all.Slice(0, at, hi)
		}
		g.Bind(part(w.values), part(w.masters), part(w.grads))
		for _, p := range g.Params {
			w.index[p] = len(w.params)
			w.params = append(w.params, p)
			w.place(at, at+p.Numel(), p.Decay)
			at += p.Numel()
		}
	}
	w.ready = make([]int64, len(w.params))
	return w, nil
}

// place notes whether a parameter decays; neighbours that do are one range.
func (w *Replicated) place(lo, hi int64, decay bool) {
	last := len(w.decay) - 1
	switch {
	case !decay:
	case last >= 0 && w.decay[last].Hi == lo:
		w.decay[last].Hi = hi
	default:
		w.decay = append(w.decay, device.Range{Lo: lo, Hi: hi})
	}
}

type planned struct {
	name   string
	dtype  tensor.DType
	numel  int64
	tensor *tensor.Tensor
}

// plan is the list of buffers: a nil optimizer (evaluation) needs the weights alone.
func (w *Replicated) plan(n int64) []planned {
	p := []planned{{"weights", w.compute, n, &w.values}}
	if w.opt == nil {
		return p
	}
	if w.compute != tensor.F32 {
		p = append(p, planned{"master weights", tensor.F32, n, &w.masters})
	}
	p = append(p, planned{"gradients", tensor.F32, n, &w.grads}, planned{"norm", tensor.F64, 1, &w.sum})
	if w.opt.Name == "adamw" {
		p = append(p, planned{"first moments", tensor.F32, n, &w.m}, planned{"second moments", tensor.F32, n, &w.v})
	}
	return p
}

// Free gives the memory back.
func (w *Replicated) Free() {
	for _, b := range w.buffers {
		b.Free()
	}
	w.buffers = nil
}

func (w *Replicated) Components() []model.Component {
	var c []model.Component
	for _, b := range w.buffers {
		c = append(c, model.Component{Name: b.Name(), Bytes: b.Bytes()})
	}
	return c
}

// Need and Done have nothing to do: everything is here.
func (w *Replicated) Need(int, device.Stream) error { return nil }
func (w *Replicated) Done(int, device.Stream) error { return nil }

// GradReady counts: a gradient that is complete never, twice or early would make a sharded reduction wrong without a word.
func (w *Replicated) GradReady(p *model.Param, _ device.Stream) error {
	i, ok := w.index[p]
	if !ok {
		return status.Errorf(status.Internal, "train: gradient of %s, which is not a parameter", p.Name)
	}
	w.ready[i]++
	return nil
}

func (w *Replicated) Begin(s device.Stream, micros int64) error {
	clear(w.ready)
	w.micros = micros
	return w.dev.Fill(s, w.grads, 0)
}

func (w *Replicated) Reduce(s device.Stream) (float64, error) {
	for i, n := range w.ready {
		if n != w.micros {
			return 0, status.Errorf(status.Internal, "train: gradient of %s was complete %d times in %d micro steps", w.params[i].Name, n, w.micros)
		}
	}
	if err := w.world.AllReduce(s, w.grads, comm.Sum); err != nil {
		return 0, err
	}
	if err := w.dev.Fill(s, w.sum, 0); err != nil {
		return 0, err
	}
	if err := w.dev.SumSquares(s, w.sum, w.grads); err != nil {
		return 0, err
	}
	if err := w.dev.Copy(s, w.hostSum, w.sum); err != nil {
		return 0, err
	}
	if err := comm.Meet(w.world); err != nil {
		return 0, err
	}
	if err := s.Sync(); err != nil {
		return 0, err
	}
	return math.Sqrt(w.hostSum.Float64s()[0]), nil
}

func (w *Replicated) Update(s device.Stream, lr, scale float64, t int64) error {
	exact, low := w.values, tensor.Tensor{}
	if !w.masters.IsNil() {
		exact, low = w.masters, w.values
	}
	o := w.opt
	if o.Name == "adamw" {
		w.adamw = device.AdamW{W: exact, G: w.grads, M: w.m, V: w.v, Low: low, LR: lr, Beta1: o.Betas[0], Beta2: o.Betas[1], Eps: o.Eps,
			WeightDecay: o.WeightDecay, GradScale: scale, Decay: w.decay, Step: t}
		return w.dev.AdamW(s, &w.adamw)
	}
	w.sgd = device.SGD{W: exact, G: w.grads, Low: low, LR: lr, WeightDecay: o.WeightDecay, GradScale: scale, Decay: w.decay}
	return w.dev.SGD(s, &w.sgd)
}
