package train

import (
	"math"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// Divided stores a model whose experts are divided among ranks (axis expert of the mesh): the
// experts of this rank, over the ranks that have the same ones (axis expert data), and all other
// parameters over the world. Both have the same ZeRO stage. The gradients of experts already have
// the terms of all tokens that were sent to the rank, so they are added over axis expert data
// alone.
type Divided struct {
	storages
	dense, experts Weights // of storages; dense is nil if all parameters are of experts
	mesh           *comm.Mesh
	dev            device.Device
	groups         []*model.Group
	hostSum        tensor.Tensor // [1] F64
	// memory for the experts of another rank, for Whole: F32, or of the compute type without an
	// optimizer
	other     tensor.Tensor
	buffers   []*device.Arena
	broadcast int64 // bytes of all broadcasts so far
}

// newDivided stores parameters that are all trained, or of an evaluation. Collective.
func newDivided(d device.Device, mesh *comm.Mesh, groups []*model.Group, compute tensor.DType, opt *OptimizerConfig,
	stage int, o Offload) (Weights, error) {
	dense, own, largest := divide(groups, mesh)
	if largest == 0 {
		return newWeights(d, mesh.World, groups, compute, opt, stage, o)
	}
	if opt != nil { // patterns may match experts of other ranks
		if err := opt.checkGroups(groups); err != nil {
			return nil, err
		}
	}
	w := &Divided{mesh: mesh, dev: d, groups: groups, hostSum: tensor.OfFloat64(make([]float64, 1), 1)}
	err := func() (err error) {
		o.checked = true
		if total(dense) > 0 {
			if w.dense, err = newWeights(d, mesh.World, dense, compute, opt, stage, o); err != nil {
				return err
			}
			w.storages = append(w.storages, newStorage(w.dense, dense, false))
			if stream := streamOf(w.dense); stream != nil {
				o.stream = stream
			}
		}
		dtype, name := tensor.F32, o.what+"experts of another rank"
		if opt == nil {
			dtype = compute
		}
		o.what += "expert "
		if w.experts, err = newWeights(d, mesh.ExpertData, own, compute, opt, stage, o); err != nil {
			return err
		}
		w.storages = append(w.storages, newStorage(w.experts, own, false))
		plan := []planned{{name, dtype, largest, &w.other, false}}
		if err = fits(d, stage, components(plan)); err == nil {
			w.buffers, err = allocate(d, plan)
		}
		return err
	}()
	if err != nil {
		w.Free()
		return nil, err
	}
	return w, nil
}

// divide returns the parameters of each group that all ranks have, and the experts of this rank.
// largest is the number of elements of the largest experts of a rank in a group; 0 = no parameters
// are divided.
func divide(groups []*model.Group, mesh *comm.Mesh) (dense, own []*model.Group, largest int64) {
	if mesh.Expert == nil {
		return groups, nil, 0
	}
	for _, g := range groups {
		all, experts := g.Shards(mesh.Expert.Size())
		dense, own = append(dense, all), append(own, experts[mesh.Expert.Rank()])
		for _, x := range experts {
			largest = max(largest, x.Numel())
		}
	}
	return dense, own, largest
}

// total returns the number of elements of the groups.
func total(groups []*model.Group) (n int64) {
	for _, g := range groups {
		n += g.Numel()
	}
	return n
}

// streamOf returns the communication stream of a storage; nil if it has none. All storages of a
// rank share one, so that their collectives run in the same order on every rank.
func streamOf(w Weights) device.Stream {
	switch w := w.(type) {
	case *ZeRO:
		return w.commStream
	case *Replicated:
		return w.commStream
	case *Divided:
		if s := streamOf(w.dense); s != nil {
			return s
		}
		return streamOf(w.experts)
	}
	return nil
}

func (w *Divided) Begin(s device.Stream, microBatches int64) error {
	for i := range w.storages {
		if err := w.storages[i].Begin(s, microBatches); err != nil {
			return err
		}
	}
	return nil
}

func (w *Divided) GradReady(p *model.Param, s device.Stream) error {
	if p.ExpertShard(w.mesh.Expert.Size()) != model.AllRanks {
		return w.experts.GradReady(p, s)
	}
	return w.dense.GradReady(p, s)
}

// Reduce sums the gradients. The norm has the experts of all ranks of axis expert, each once.
func (w *Divided) Reduce(s device.Stream) (float64, error) {
	dense, sum := 0.0, w.hostSum.Float64s()
	if w.dense != nil {
		var err error
		if dense, err = w.dense.Reduce(s); err != nil {
			return 0, err
		}
	}
	experts, err := w.experts.Reduce(s)
	if err != nil {
		return 0, err
	}
	sum[0] = experts * experts
	if err := w.mesh.Expert.AllReduce(nil, w.hostSum, comm.Sum); err != nil {
		return 0, err
	}
	return math.Sqrt(dense*dense + sum[0]), nil
}

func (w *Divided) Update(s device.Stream, lr, scale float64, t int64) error {
	for i := range w.storages {
		if err := w.storages[i].Update(s, lr, scale, t); err != nil {
			return err
		}
	}
	return nil
}

// Portions lists the portions of all ranks, the same on every rank.
func (w *Divided) Portions() []model.Portion {
	return model.PortionsOf(w.groups, w.mesh.Expert.Size())
}

func (w *Divided) Stored() (all []Stored) {
	if w.dense != nil {
		all = w.dense.Stored()
	}
	for _, x := range w.experts.Stored() {
		x.Shard = w.mesh.Expert.Rank()
		all = append(all, x)
	}
	return all
}

// Whole gathers a portion. Experts are gathered by the ranks that have them, which then send them
// to the others.
func (w *Divided) Whole(x model.Portion, grads bool, s device.Stream) (tensor.Tensor, error) {
	if x.Shard == model.AllRanks {
		return w.dense.Whole(x, grads, s)
	}
	all := w.other.Slice(0, 0, x.Numel())
	if c := w.mesh.Expert; c.Rank() == x.Shard {
		var err error
		if all, err = w.experts.Whole(x, grads, s); err != nil {
			return all, err
		}
	}
	c := w.mesh.Expert
	w.broadcast += comm.BroadcastSent(c.Rank(), x.Shard, c.Size(), all.Bytes())
	return all, c.Broadcast(s, all, x.Shard)
}

func (w *Divided) Offloaded() bool { return w.experts.Offloaded() }

// Components lists the memory of both storages, and of experts of other ranks.
func (w *Divided) Components() []model.Component {
	return append(w.storages.Components(), allocated(w.dev, w.buffers)...)
}

// Arenas returns the arenas of this memory.
func (w *Divided) Arenas() []*device.Arena { return append(w.storages.Arenas(), w.buffers...) }

// Traffic returns the bytes of both storages, and of the broadcasts of experts.
func (w *Divided) Traffic() (all []Traffic) {
	if w.dense != nil {
		all = w.dense.Traffic()
	}
	for _, t := range w.experts.Traffic() {
		t.What += " of experts"
		all = append(all, t)
	}
	return append(all, Traffic{w.mesh.Expert.Axis(), comm.OpBroadcast,
		"experts for checkpoints, samples and model folders", w.broadcast})
}

func (w *Divided) Free() {
	w.storages.Free()
	for _, b := range w.buffers {
		b.Free()
	}
	w.buffers = nil
}
