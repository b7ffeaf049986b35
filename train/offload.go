package train

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// OptimizerStep says where the optimizer's states are and where a step runs.
type OptimizerStep uint8

const (
	// StepOnDevice: states are in device memory.
	StepOnDevice OptimizerStep = iota
	// StepStreamed: states are in host memory. The device updates them bucket by bucket, in two
	// slots: while it has one bucket, the next is copied to it and the previous one back.
	StepStreamed
	// StepOnHost: states are in host memory. Gradients are copied to the host, which computes the
	// step, and weights of the compute type are copied back.
	StepOnHost
)

// Offload says how NewWeights stores the optimizer's states: the F32 master weights, where the
// compute type is another one, and the moments of AdamW (Ren et al. 2021, arXiv:2101.06840).
type Offload struct {
	Step OptimizerStep
	// Gradients are summed in host memory as well. The device has gradients of two layer groups.
	Gradients bool
	Host      Stepper // for StepOnHost: computes in host memory; its calls return after the step
	FreeHost  int64   // bytes of host memory that this rank may use; 0 = unknown
	PerNode   int     // ranks that share the host's memory, for messages; 0 = 1
	Bucket    int64   // elements of a slot; 0 = 8 Mi

	// of one storage of several
	what    string        // prefix of the names in the memory table
	stage   int           // parallel.zero, for messages
	stream  device.Stream // the communication stream, which belongs to another storage; nil = none
	checked bool          // the patterns of [[optimizer.group]] have been compared with all groups
}

// StepRates are the speeds that decide where a step of an offloaded optimizer runs.
type StepRates struct {
	Copies float64 // bytes/s between host and device memory, in each direction at the same time
	Host   float64 // bytes/s that the CPU threads of a rank read and write in a step
}

// StepSeconds returns the expected seconds of a step for n elements. States that are streamed take
// as long as the copies in the direction of more bytes. On the host, copies of gradients and
// weights overlap with the step, which reads and writes 28 bytes for each element with AdamW and 12
// with SGD: F32 weights, gradients and moments, and 2 more in BF16 for the weights of that type.
func (r *StepRates) StepSeconds(step OptimizerStep, o *OptimizerConfig, compute tensor.DType, gradients bool,
	n int64) float64 {
	moments, masters, grads, weights := int64(0), int64(0), int64(4), compute.Size()
	if o.Name == "adamw" {
		moments = 8
	}
	if compute != tensor.F32 {
		masters = 4
	}
	if step == StepStreamed {
		in := masters + moments
		if gradients {
			in += grads
		}
		return float64(n*in) / r.Copies
	}
	bytes := 2*4 + 2*moments + grads
	if compute != tensor.F32 {
		bytes += weights
	}
	link := weights
	if !gradients {
		link = max(link, grads)
	}
	return float64(n) * max(float64(bytes)/r.Host, float64(link)/r.Copies)
}

// FasterStep returns the step that is expected to take less time: StepStreamed or StepOnHost.
func (r *StepRates) FasterStep(o *OptimizerConfig, compute tensor.DType, gradients bool) OptimizerStep {
	const n = 1
	if r.StepSeconds(StepOnHost, o, compute, gradients, n) < r.StepSeconds(StepStreamed, o, compute, gradients, n) {
		return StepOnHost
	}
	return StepStreamed
}

// defaultBucket is the number of elements of a slot: copies of 32 MiB have the full rate of a link,
// and two slots of AdamW with master weights take 192 MiB.
const defaultBucket = 8 << 20

// offload has the slots through which states pass, or through which gradients and weights pass.
type offload struct {
	Offload
	largest          int64         // elements of a slot
	toDevice, toHost device.Stream // copies
	begun            device.Event  // recorded when the gradients are complete
	slots            [2]offloadSlot
	staging          tensor.Tensor // [largest] F32 in device memory, for gradients in host memory
}

// offloadSlot is memory for one bucket. If the device computes, it has states in device memory, and
// gradients if these are in host memory. If the host computes, it has weights in host memory, and
// gradients if these are in device memory.
type offloadSlot struct {
	State
	grads  tensor.Tensor
	filled device.Event // recorded when the bucket has been copied to the slot
	done   device.Event // recorded when the device has updated the bucket
	stored device.Event // recorded when the results have been copied out of the slot
}

// Offloaded reports whether the optimizer's states are in host memory, and not in the device's.
func (o *optimizer) Offloaded() bool {
	return o.OptimizerConfig != nil && o.Step != StepOnDevice
}

// hasMasters reports whether master weights are stored beside the weights of the compute type.
func (o *optimizer) hasMasters(compute tensor.DType) bool {
	return compute != tensor.F32 || o.Offloaded() && o.Step == StepOnHost
}

// plan returns the buffers of the states of n elements, with a suffix for their names, and of the
// slots. own is the number of elements of the largest range of which this rank owns states.
func (o *optimizer) plan(n, own int64, suffix string, compute tensor.DType, masters, m,
	v *tensor.Tensor) (p []planned) {
	host := o.Offloaded()
	adamw := o.Name == "adamw"
	if o.hasMasters(compute) {
		p = append(p, planned{masterWeights + suffix, tensor.F32, n, masters, host})
	}
	if adamw {
		p = append(p, planned{firstMoments + suffix, tensor.F32, n, m, host},
			planned{secondMoments + suffix, tensor.F32, n, v, host})
	}
	if !host {
		return p
	}
	if o.largest = o.Bucket; o.largest == 0 {
		o.largest = defaultBucket
	}
	o.largest = min(o.largest, max(1, own))
	for i := range o.slots {
		x, name := &o.slots[i], [...]string{", first slot", ", second slot"}[i]
		if o.Gradients != (o.Step == StepOnHost) {
			p = append(p, planned{"gradients" + name, tensor.F32, o.largest, &x.grads, o.Step == StepOnHost})
		}
		if o.Step == StepOnHost {
			if compute != tensor.F32 {
				p = append(p, planned{"weights" + name, compute, o.largest, &x.Compute, true})
			}
			continue
		}
		if o.hasMasters(compute) {
			p = append(p, planned{masterWeights + name, tensor.F32, o.largest, &x.Master, false})
		}
		if adamw {
			p = append(p, planned{firstMoments + name, tensor.F32, o.largest, &x.M, false},
				planned{secondMoments + name, tensor.F32, o.largest, &x.V, false})
		}
	}
	if o.Gradients {
		p = append(p, planned{"gradients, copy of a block", tensor.F32, o.largest, &o.staging, false})
	}
	return p
}

// check returns an error for states that cannot be offloaded.
func (o *optimizer) check(compute tensor.DType) error {
	switch {
	case !o.Offloaded():
		return nil
	case o.dev.Info().Place == tensor.Host:
		return status.Errorf(status.InvalidConfig,
			"memory.optimizer: offloading on the device %s, which computes in host memory: the optimizer's states are there already; set memory.optimizer = \"auto\"",
			o.dev.Info().Kind)
	case o.Name == "sgd" && compute == tensor.F32:
		return status.Errorf(status.InvalidConfig,
			"memory.optimizer: offloading with optimizer.name = \"sgd\" in f32, which has no state beside the weights; set memory.optimizer = \"auto\"")
	}
	return nil
}

// open creates the streams and events. The caller calls close, also after an error.
func (o *optimizer) open() (err error) {
	if !o.Offloaded() {
		return nil
	}
	for _, s := range []*device.Stream{&o.toDevice, &o.toHost} {
		if *s, err = o.dev.NewStream(); err != nil {
			return err
		}
	}
	for _, e := range o.events() {
		if *e, err = o.dev.NewEvent(); err != nil {
			return err
		}
	}
	return nil
}

func (o *optimizer) events() []*device.Event {
	all := []*device.Event{&o.begun}
	for i := range o.slots {
		x := &o.slots[i]
		all = append(all, &x.filled, &x.done, &x.stored)
	}
	return all
}

func (o *optimizer) close() {
	for _, s := range []device.Stream{o.toDevice, o.toHost} {
		if s != nil {
			s.Close()
		}
	}
	for _, e := range o.events() {
		if *e != nil {
			(*e).Close()
		}
	}
}

// states returns the states of a bucket that are in host memory, each with its memory in a slot,
// and then the gradients, if they are in host memory.
func (x *offloadSlot) states(b *bucket) [4]struct{ host, slot tensor.Tensor } {
	all := [4]struct{ host, slot tensor.Tensor }{{b.Master, x.Master}, {b.M, x.M}, {b.V, x.V}, {b.grads, x.grads}}
	for i := range all {
		if all[i].slot.IsNil() {
			all[i].host = tensor.Tensor{}
			continue
		}
		all[i].slot = all[i].slot.Slice(0, 0, b.Hi-b.Lo)
	}
	return all
}

// stream runs a step on the device. States pass through the slots.
func (o *optimizer) stream(s device.Stream) error {
	for i := range o.buckets {
		b, x := &o.buckets[i], &o.slots[i%2]
		if err := o.toDevice.Wait(x.stored); err != nil {
			return err
		}
		states := x.states(b)
		here := *b
		for k, to := range [...]*tensor.Tensor{&here.Master, &here.M, &here.V, &here.grads} {
			if states[k].host.IsNil() {
				continue
			}
			*to = states[k].slot
			if err := o.dev.Copy(o.toDevice, states[k].slot, states[k].host); err != nil {
				return err
			}
		}
		if err := hand(o.toDevice, x.filled, s); err != nil {
			return err
		}
		if err := o.step(o.dev, s, &here); err != nil {
			return err
		}
		if err := hand(s, x.done, o.toHost); err != nil {
			return err
		}
		for k := range states[:3] {
			if states[k].host.IsNil() {
				continue
			}
			if err := o.dev.Copy(o.toHost, states[k].host, states[k].slot); err != nil {
				return err
			}
		}
		if err := o.toHost.Record(x.stored); err != nil {
			return err
		}
	}
	return o.finish(s)
}

// onHost runs a step on the host. While it updates a bucket, the gradients of the next one are
// copied to the host and the weights of the previous one to the device. The host waits for copies
// of this rank alone, so no rank has to have enqueued anything.
func (o *optimizer) onHost(s device.Stream) error {
	if err := hand(s, o.begun, o.toHost); err != nil {
		return err
	}
	if err := o.toDevice.Wait(o.begun); err != nil {
		return err
	}
	if err := o.download(0); err != nil {
		return err
	}
	for i := range o.buckets {
		if err := o.download(i + 1); err != nil {
			return err
		}
		b, x := &o.buckets[i], &o.slots[i%2]
		for _, e := range []device.Event{x.filled, x.stored} {
			if err := e.Sync(); err != nil {
				return err
			}
		}
		here, n := *b, b.Hi-b.Lo
		if !o.Gradients {
			here.grads = x.grads.Slice(0, 0, n)
		}
		here.Compute = x.Compute
		result := b.Master
		if !x.Compute.IsNil() {
			here.Compute = x.Compute.Slice(0, 0, n)
			result = here.Compute
		}
		if err := o.step(o.Host, nil, &here); err != nil {
			return err
		}
		if err := o.dev.Copy(o.toDevice, b.Compute, result); err != nil {
			return err
		}
		if err := o.toDevice.Record(x.stored); err != nil {
			return err
		}
	}
	return o.finish(s)
}

// download starts to copy the gradients of bucket i, if there is one, to its slot, unless gradients
// are in host memory. The host has finished with the slot.
func (o *optimizer) download(i int) error {
	if i >= len(o.buckets) || o.Gradients {
		return nil
	}
	b, x := &o.buckets[i], &o.slots[i%2]
	if err := o.dev.Copy(o.toHost, x.grads.Slice(0, 0, b.Hi-b.Lo), b.grads); err != nil {
		return err
	}
	return o.toHost.Record(x.filled)
}

// storeGradients copies new gradients [n] from device memory to sums in host memory, or with add
// adds them to these sums block by block. event is recorded in the stream that has computed the
// gradients, and after the call in the stream that copies.
func (o *optimizer) storeGradients(sums, grads tensor.Tensor, add bool, event device.Event) error {
	if err := o.toHost.Wait(event); err != nil {
		return err
	}
	for at, n := int64(0), sums.Numel(); add && at < n; at += o.largest {
		block := grads.Slice(0, at, min(n, at+o.largest))
		staging := o.staging.Slice(0, 0, block.Numel())
		if err := o.dev.Copy(o.toHost, staging, sums.Slice(0, at, at+block.Numel())); err != nil {
			return err
		}
		if err := o.dev.Add(o.toHost, block, block, staging); err != nil {
			return err
		}
	}
	if sums.Numel() > 0 {
		if err := o.dev.Copy(o.toHost, sums, grads); err != nil {
			return err
		}
	}
	return o.toHost.Record(event)
}

// finish makes a stream wait for the copies of both slots.
func (o *optimizer) finish(s device.Stream) error {
	for i := range o.slots {
		if err := s.Wait(o.slots[i].stored); err != nil {
			return err
		}
	}
	return nil
}

// hand records an event in a stream and makes another one wait for it.
func hand(from device.Stream, e device.Event, to device.Stream) error {
	if err := from.Record(e); err != nil {
		return err
	}
	return to.Wait(e)
}

// newOptimizer returns an optimizer without buckets. c is nil for an evaluation.
func newOptimizer(d device.Device, c *OptimizerConfig, o Offload) optimizer {
	x := optimizer{OptimizerConfig: c, dev: d, offload: offload{Offload: o}}
	if c != nil {
		x.decayOf, _ = c.decays() // newWeights has checked the patterns
	}
	return x
}

// allocate allocates the buffers of Weights, after it has checked that they are possible and fit,
// and what the optimizer needs to copy states. The caller frees what it returns, and calls close,
// also after an error.
func (o *optimizer) allocate(plan []planned, compute tensor.DType) ([]*device.Arena, error) {
	if err := o.check(compute); err != nil {
		return nil, err
	}
	for i := range plan {
		plan[i].name = o.what + plan[i].name
	}
	if err := fits(o.dev, o.stage, components(plan)); err != nil {
		return nil, err
	}
	if err := fitsHost(o.dev, o.FreeHost, o.PerNode, o.stage, components(plan)); err != nil {
		return nil, err
	}
	buffers, err := allocate(o.dev, plan)
	if err == nil {
		err = o.open()
	}
	return buffers, err
}
