package train

import (
	"math"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// planned is a flat buffer that is to be allocated.
type planned struct {
	name   string
	dtype  tensor.DType
	numel  int64
	tensor *tensor.Tensor
}

func components(plan []planned) (c []model.Component) {
	for _, b := range plan {
		c = append(c, model.Component{Name: b.name, Bytes: b.numel * b.dtype.Size()})
	}
	return c
}

// allocate makes the buffers and sets their tensors; what it returns is to be freed in any case.
func allocate(d device.Device, plan []planned) (buffers []*device.Arena, err error) {
	for _, b := range plan {
		a, err := device.NewArena(d, b.name, b.numel*b.dtype.Size())
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

func held(buffers []*device.Arena) (c []model.Component) {
	for _, b := range buffers {
		c = append(c, model.Component{Name: b.Name(), Bytes: b.Bytes()})
	}
	return c
}

// addRange adds a range behind the others; neighbours are one.
func addRange(all []device.Range, r device.Range) []device.Range {
	if last := len(all) - 1; last >= 0 && all[last].Hi == r.Lo {
		all[last].Hi = r.Hi
		return all
	}
	return append(all, r)
}

// readiness counts how often each gradient was complete in a step: one that is so never, twice or
// early would make a sharded reduction wrong without a word.
type readiness struct {
	params []*model.Param
	index  map[*model.Param]int
	count  []int64
	micros int64
}

func (r *readiness) add(p *model.Param) {
	if r.index == nil {
		r.index = map[*model.Param]int{}
	}
	r.index[p] = len(r.params)
	r.params, r.count = append(r.params, p), append(r.count, 0)
}

func (r *readiness) begin(micros int64) {
	clear(r.count)
	r.micros = micros
}

func (r *readiness) note(p *model.Param) error {
	i, ok := r.index[p]
	if !ok {
		return status.Errorf(status.Internal, "train: gradient of %s, which is not a parameter", p.Name)
	}
	r.count[i]++
	return nil
}

func (r *readiness) check() error {
	for i, n := range r.count {
		if n != r.micros {
			return status.Errorf(status.Internal, "train: gradient of %s was complete %d times in %d micro steps", r.params[i].Name, n, r.micros)
		}
	}
	return nil
}

// squares is the sum of the gradients' squares, on the device and on the host: F64 [1].
type squares struct{ sum, hostSum tensor.Tensor }

func newSquares() squares { return squares{hostSum: tensor.OfFloat64(make([]float64, 1), 1)} }

// fetchSum brings the sum to the host. All ranks call it: none waits for the device while another
// has yet to give it work.
func (x *squares) fetchSum(s device.Stream, d device.Device, world comm.Comm) error {
	if err := d.Copy(s, x.hostSum, x.sum); err != nil {
		return err
	}
	if err := comm.Meet(world); err != nil {
		return err
	}
	return s.Sync()
}

func (x *squares) norm() float64 { return math.Sqrt(x.hostSum.Float64s()[0]) }
