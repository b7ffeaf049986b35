package model

import (
	"fmt"
	"hash/fnv"
	"math"
	"runtime"
	"sync"

	"ulysses/device"
	"ulysses/internal/splitmix"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Param is one tensor of weights.
type Param struct {
	Name   string // in Hugging Face files
	Shape  []int64
	Decay  bool          // weight decay applies: two dimensions or more
	Frozen bool          // it is not trained: no gradient is computed, and Grad is nil
	Value  tensor.Tensor // of the compute type; valid while attached
	Grad   tensor.Tensor // F32, added to; valid while attached, nil without a backward half
	Owned  Part          // the elements that this rank owns

	matrix bool // it is a matrix of a linear layer
	expert bool // it is a matrix of an expert
	// the number of this expert, and the experts of the layer
	number, experts int64
	// it is a matrix that cannot have an adapter: of a router, or of an MLP that PEFT takes for
	// experts
	bare    bool
	adapter *adapter // beside the matrix; nil = none

	axes   []string     // the fields of config.json that determine Shape
	stored tensor.DType // in the source's file, and in the files that Save writes
	fill   fill
	centre float64 // added to a norm's weight before it is used
}

// Part is elements [Lo, Hi) of a parameter, flat, that one rank owns: it loads, updates and saves
// them.
type Part struct {
	Lo, Hi int64
	Value  tensor.Tensor // [Hi - Lo] of the compute type
	// [Hi - Lo] F32, of which Value is the rounded copy; nil if the optimizer updates Value. It may
	// be in the host's memory.
	Master tensor.Tensor
}

// Full returns the F32 master if there is one, otherwise the values.
func (p *Part) Full() tensor.Tensor {
	if p.Master.IsNil() {
		return p.Value
	}
	return p.Master
}

// fill is how Init sets a parameter.
type fill uint8

const (
	normal fill = iota
	ones
	zeros
	decays  // ln of uniform(0.01, 16), as Qwen3.5 initializes A_log
	kaiming // uniform(-1/√in, 1/√in), as PEFT initializes A of an adapter
)

func newParam(name string, dtype tensor.DType, start fill, axes []string, shape ...int64) *Param {
	return &Param{Name: name, Shape: shape, Decay: len(shape) > 1, axes: axes, stored: dtype, fill: start}
}

// newNorm returns the weight of a norm over n features. Its effective value starts as 1.
func newNorm(cfg *Config, name, axis string, n int64) *Param {
	start := ones
	if cfg.NormCentre() == 1 {
		start = zeros
	}
	p := newParam(name, cfg.DType, start, []string{axis}, n)
	p.centre = cfg.NormCentre()
	return p
}

// Numel returns the number of elements.
func (p *Param) Numel() int64 { return tensor.Of(nil, tensor.F32, p.Shape...).Numel() }

// Group is the unit in which parameters are gathered and released: the embedding, each layer, the
// head. The trained parameters follow each other in memory, in order and without padding, so that
// matrices that share their input (q, k, v; gate, up) are one matrix. The frozen parameters follow
// each other in the same way, in memory of their own.
type Group struct {
	Name   string // embed, layer 0 ..., head
	Params []*Param
}

// Numel returns the number of elements of all parameters.
func (g *Group) Numel() int64 {
	n := int64(0)
	for _, p := range g.Params {
		n += p.Numel()
	}
	return n
}

// Bind calls Attach and Own for the whole group: values [Numel] of the compute type, masters and
// grads [Numel] F32, all dense. Masters are for training in another type than F32. Evaluation
// passes nil for grads.
func (g *Group) Bind(values, masters, grads tensor.Tensor) {
	g.Attach(values, grads)
	g.Own(0, values, masters)
}

// Attach sets Value and Grad of the group's parameters to views of values [Numel], of the compute
// type, and of grads [Numel], F32. Both are dense or nil; nil sets the views to nil.
func (g *Group) Attach(values, grads tensor.Tensor) {
	n, at := g.Numel(), int64(0)
	for _, t := range [...]*tensor.Tensor{&values, &grads} {
		if !t.IsNil() && t.Dim(0) != n {
			panic(fmt.Sprintf("model.Attach: %v for %d elements of group %s", *t, n, g.Name))
		}
	}
	view := func(all tensor.Tensor, p *Param) tensor.Tensor {
		if all.IsNil() {
			return all
		}
		return all.Slice(0, at, at+p.Numel()).View(p.Shape...)
	}
	for _, p := range g.Params {
		p.Value, p.Grad = view(values, p), view(grads, p)
		at += p.Numel()
	}
}

// Own sets Owned of the group's parameters. This rank owns the group's elements [lo, lo+n): values
// [n] of the compute type, and masters [n] F32 or nil.
func (g *Group) Own(lo int64, values, masters tensor.Tensor) {
	hi, at := lo+values.Dim(0), int64(0)
	for _, p := range g.Params {
		from, to := max(lo, at), min(hi, at+p.Numel())
		to = max(from, to)
		p.Owned = Part{Lo: from - at, Hi: to - at}
		if from < to {
			p.Owned.Value = values.Slice(0, from-lo, to-lo)
			if !masters.IsNil() {
				p.Owned.Master = masters.Slice(0, from-lo, to-lo)
			}
		}
		at += p.Numel()
	}
}

// Access says how a use of a group's weights accesses them.
type Access uint8

const (
	Reads Access = 1 << iota // the values are read
	Adds                     // gradients are added
)

// Use is the work between Weights.Gather of a group and Weights.Release. At most two uses overlap.
type Use struct {
	Group  int
	Access Access
}

// Weights gives a pass its parameters and takes their gradients; package train implements it. The
// calls come in the order of execution, the same on every rank.
type Weights interface {
	// Pass starts a pass; its uses of groups begin in this order.
	Pass(order []Use) error
	// Gather starts the next use of the order: afterwards Value and Grad of the group's parameters
	// are attached.
	Gather(group int, s device.Stream) error
	// Release ends the use of a group.
	Release(group int, s device.Stream) error
	// GradReady reports, once per micro-batch and before Release, that this rank's gradient of p
	// is complete.
	GradReady(p *Param, s device.Stream) error
}

// Init initializes the elements that this rank owns, as transformers does: normal(0,
// initializer_range) for matrices and convolutions, 1 for norms, 0 for biases. A value depends only
// on the seed, the parameter's name and the element's index, not on the ranks.
func (m *Model) Init(seed uint64) error { return m.init(seed, func(*Param) bool { return true }) }

func (m *Model) init(seed uint64, which func(*Param) bool) error {
	s, err := m.dev.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	for _, g := range m.groups {
		for _, p := range g.Params {
			if !which(p) {
				continue
			}
			if err := m.initParam(s, p, seed); err != nil {
				return status.Errorf(status.Of(err), "model.Init: %s: %w", p.Name, err)
			}
		}
	}
	return s.Sync()
}

func (m *Model) initParam(s device.Stream, p *Param, seed uint64) error {
	h := fnv.New64a()
	h.Write([]byte(p.Name))
	key := splitmix.Mix(splitmix.Mix(seed) ^ h.Sum64())
	fill := func(at uint64, dst []float32) {
		for i := range dst {
			switch at := at + uint64(i); p.fill {
			case ones:
				dst[i] = 1
			case zeros:
				dst[i] = 0
			case decays:
				dst[i] = float32(math.Log(0.01 + 15.99*uniform(key, at)))
			case kaiming:
				dst[i] = float32((2*uniform(key, at) - 1) / math.Sqrt(float64(p.Shape[1])))
			default:
				dst[i] = float32(m.Config.InitializerRange * gauss(key, at))
			}
		}
	}
	// A model has billions of normal deviates, so all cores compute them.
	const block = 1 << 16
	workers := int64(runtime.GOMAXPROCS(0))
	buffer := make([]float32, min(p.Numel(), workers*block))
	return m.upload(s, p, buffer, func(at int64, dst []float32) error {
		var group sync.WaitGroup
		for lo := 0; lo < len(dst); lo += block {
			group.Go(func() { fill(uint64(at)+uint64(lo), dst[lo:min(lo+block, len(dst))]) })
		}
		group.Wait()
		return nil
	})
}

// upload copies the elements of a parameter that this rank owns to the device, through a buffer.
// read fills dst with the parameter's elements from at on.
func (m *Model) upload(s device.Stream, p *Param, buffer []float32, read func(at int64, dst []float32) error) error {
	owned := &p.Owned
	for at := owned.Lo; at < owned.Hi; at += int64(len(buffer)) {
		dst := buffer[:min(int64(len(buffer)), owned.Hi-at)]
		if err := read(at, dst); err != nil {
			return err
		}
		n := int64(len(dst))
		if err := device.CopyAnywhere(m.dev, s, owned.Full().Slice(0, at-owned.Lo, at-owned.Lo+n),
			tensor.OfFloat32(dst, n)); err != nil {
			return err
		}
		if err := s.Sync(); err != nil { // the buffer is used again
			return err
		}
	}
	if owned.Master.IsNil() {
		return nil
	}
	if err := m.dev.Copy(s, owned.Value, owned.Master); err != nil {
		return err
	}
	return s.Sync()
}

// gauss returns the i-th normal deviate of a key (Box & Muller 1958). It has no state, so every
// rank can compute the elements that it owns.
func gauss(key, i uint64) float64 {
	u := float64(splitmix.Mix(key+2*i)>>11+1) / (1 << 53) // in (0, 1]
	return math.Sqrt(-2*math.Log(u)) * math.Cos(2*math.Pi*uniform(key, 2*i+1))
}

// uniform returns the i-th number in [0, 1) of a key.
func uniform(key, i uint64) float64 { return float64(splitmix.Mix(key+i)>>11) / (1 << 53) }
