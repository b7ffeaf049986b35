package train

import (
	"math"
	"slices"
	"strings"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Names of buffers, to which the name of a storage can be added before and after.
const (
	gradientShard = "gradients, shard" // sums of gradients
	masterWeights = "master weights"
	firstMoments  = "first moments"
	secondMoments = "second moments"
)

// isOf reports whether a component has one of these names.
func isOf(c model.Component, names ...string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return strings.Contains(c.Name, name) })
}

// isState reports whether a component has states of the optimizer.
func isState(c model.Component) bool { return isOf(c, masterWeights, firstMoments, secondMoments) }

// planned is a flat buffer to allocate.
type planned struct {
	name   string
	dtype  tensor.DType
	numel  int64
	tensor *tensor.Tensor
	host   bool // in the host's memory
}

func (b *planned) bytes() int64 { return b.numel * b.dtype.Size() }

// label returns the name of the buffer's component.
func (b *planned) label() string {
	if b.host {
		return b.name + " (host)"
	}
	return b.name
}

// axisOf returns the axis of a communicator in the ledger.
func axisOf(c comm.Comm) string {
	if c, ok := c.(*comm.Counted); ok {
		return c.Axis()
	}
	return "world"
}

// components lists the buffers for the memory plan.
func components(plan []planned) (c []model.Component) {
	for _, b := range plan {
		c = append(c, model.Component{Name: b.label(), Bytes: b.bytes(), Host: b.host})
	}
	return c
}

// allocate allocates the buffers and sets their tensors. The caller frees what it returns, also
// after an error.
func allocate(d device.Device, plan []planned) (buffers []*device.Arena, err error) {
	for _, b := range plan {
		open := device.NewArena
		if b.host {
			open = device.NewHostArena
		}
		a, err := open(d, b.label(), b.bytes())
		if err != nil {
			return buffers, err
		}
		buffers = append(buffers, a)
		if *b.tensor, err = a.Tensor(b.dtype, b.numel); err != nil {
			return buffers, err
		}
	}
	return buffers, nil
}

// allocated lists the buffers for the memory table.
func allocated(d device.Device, buffers []*device.Arena) (c []model.Component) {
	for _, b := range buffers {
		c = append(c, model.Component{Name: b.Name(), Bytes: b.Bytes(), Host: b.Place() != d.Info().Place})
	}
	return c
}

// readiness counts how often GradReady was called for each parameter in a step. A missing, repeated
// or early call would make the reduction of a shard wrong without an error.
type readiness struct {
	params       []*model.Param
	index        map[*model.Param]int
	count        []int64
	microBatches int64
}

func (r *readiness) add(p *model.Param) {
	if r.index == nil {
		r.index = map[*model.Param]int{}
	}
	r.index[p] = len(r.params)
	r.params, r.count = append(r.params, p), append(r.count, 0)
}

func (r *readiness) begin(microBatches int64) {
	clear(r.count)
	r.microBatches = microBatches
}

func (r *readiness) note(p *model.Param) error {
	i, ok := r.index[p]
	if !ok {
		return status.Errorf(status.Internal, "train: GradReady: %s is not a parameter of this model", p.Name)
	}
	r.count[i]++
	return nil
}

func (r *readiness) check() error {
	for i, n := range r.count {
		if n != r.microBatches {
			return status.Errorf(status.Internal,
				"train: gradient of %s: GradReady was called %d times in %d micro-batches", r.params[i].Name, n,
				r.microBatches)
		}
	}
	return nil
}

// squares is the sum of the squared gradients, F64 [1] on the device and on the host.
type squares struct{ sum, hostSum tensor.Tensor }

func newSquares() squares { return squares{hostSum: tensor.OfFloat64(make([]float64, 1), 1)} }

// fetchSum copies the sum to the host. The ranks synchronize first, so that no rank waits for its
// device before the other ranks have enqueued their collectives. Collective.
func (x *squares) fetchSum(s device.Stream, d device.Device, world comm.Comm) error {
	if err := d.Copy(s, x.hostSum, x.sum); err != nil {
		return err
	}
	if err := comm.BarrierBeforeSync(world); err != nil {
		return err
	}
	return s.Sync()
}

func (x *squares) norm() float64 { return math.Sqrt(x.hostSum.Float64s()[0]) }
