package fake

import (
	"slices"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// enqueue enqueues an operation; device.Calls calls it. Tensors are checked immediately, as by a
// GPU's argument checks. When the stream runs the operation, its tensors are replaced by tensors
// over the real memory, and the CPU runs it.
func (d *Device) enqueue(s device.Stream, op device.Op, args unsafe.Pointer) error {
	o := &device.Operations[op]
	x, ok := s.(*stream)
	if !ok || x.d != d {
		return status.Errorf(status.InvalidArgument, "fake.%s: a stream of another device", o.Name)
	}
	args = o.Clone(args) // the caller may use args and lists again
	var reads []byte
	for i := range o.Operands {
		p := &o.Operands[i]
		t := p.Tensor(args)
		switch {
		case p.Unused:
			*t = tensor.Tensor{}
		case p.Host && t.Where == tensor.Host && !t.Contiguous():
			return status.Errorf(status.InvalidArgument, "fake.%s: %s is %v; a host tensor must be dense", o.Name,
				p.Name, *t)
		case p.Host && t.Where == tensor.Host:
			if t.Numel() > 0 && !p.Out {
				reads = t.RawBytes()
			}
			if p.Out && t.Numel() > 0 && !d.willRead(t.RawBytes()) {
				// Until the operation has run, the destination has values that must not be read.
				for i, raw := 0, t.RawBytes(); i < len(raw); i++ {
					raw[i] = 0xff
				}
			}
		default:
			if _, err := d.real(*t); err != nil {
				return status.Errorf(status.Of(err), "fake.%s: %s: %w", o.Name, p.Name, err)
			}
			if t.DType == tensor.BF16 && !slices.Contains(d.options.Compute, tensor.BF16) {
				return status.Errorf(status.Unsupported, "fake.%s: %s is %v; this device computes in %v", o.Name,
					p.Name, *t, d.options.Compute)
			}
		}
	}
	x.queue = append(x.queue, task{reads: reads, run: func() error {
		err := d.onHost(o, args, d.real)
		if err == nil {
			err = o.Call(d.inner, d.host, args)
		}
		if err != nil {
			return status.Errorf(status.Of(err), "fake.%s: %w", o.Name, err)
		}
		return nil
	}})
	return nil
}

// willRead reports whether an enqueued operation reads host memory.
func (d *Device) willRead(memory []byte) bool {
	lo := uintptr(unsafe.Pointer(unsafe.SliceData(memory)))
	hi := lo + uintptr(len(memory))
	for _, s := range d.streams {
		for _, t := range s.queue {
			at := uintptr(unsafe.Pointer(unsafe.SliceData(t.reads)))
			if len(t.reads) > 0 && at < hi && lo < at+uintptr(len(t.reads)) {
				return true
			}
		}
	}
	return false
}

// onHost replaces the device tensors of a call by the results of by.
func (d *Device) onHost(o *device.Operation, args unsafe.Pointer,
	by func(tensor.Tensor) (tensor.Tensor, error)) (err error) {
	for i := range o.Operands {
		if t := o.Operands[i].Tensor(args); err == nil && t.Where != tensor.Host {
			*t, err = by(*t)
		}
	}
	return err
}

// shape marks a device tensor as a host tensor, for calls of the CPU that return sizes.
func shape(t tensor.Tensor) (tensor.Tensor, error) {
	t.Where = tensor.Host
	return t, nil
}

// AttentionWorkspace returns the size that the CPU needs.
func (d *Device) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	x := *a
	_ = d.onHost(&device.Operations[device.OpAttentionForward], unsafe.Pointer(&x), shape)
	return d.inner.AttentionWorkspace(&x, backward)
}

// GatedDeltaSizes returns the sizes that the CPU needs.
func (d *Device) GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes {
	x := *a
	_ = d.onHost(&device.Operations[device.OpGatedDeltaForward], unsafe.Pointer(&x), shape)
	return d.inner.GatedDeltaSizes(&x)
}
