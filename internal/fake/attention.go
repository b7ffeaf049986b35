package fake

import (
	"slices"

	"ulysses/device"
	"ulysses/tensor"
)

// AttentionWorkspace is the CPU's, for tensors in F32.
func (d *Device) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	x := *a
	for _, t := range []*tensor.Tensor{&x.Q, &x.K, &x.V, &x.Out} {
		t.DType, t.Where = tensor.F32, tensor.Host
	}
	return d.inner.AttentionWorkspace(&x, backward)
}

// attention copies the lists, which the caller may use again, and finds the memory of what both passes share.
func attention(a *device.Attention) device.Attention {
	x := *a
	x.CuQ, x.CuK, x.KVHead = slices.Clone(a.CuQ), slices.Clone(a.CuK), slices.Clone(a.KVHead)
	if a.Window != nil {
		w := *a.Window
		x.Window = &w
	}
	return x
}

func (d *Device) AttentionForward(s device.Stream, a *device.Attention) error {
	x := attention(a)
	return d.enqueue(s, "AttentionForward", tensors{x.Q, x.K, x.V, x.Out, x.LSE, x.Workspace}, func(f *frame) func() error {
		x.Q, x.K, x.V, x.LSE, x.Workspace, x.Out = f.in(x.Q), f.in(x.K), f.in(x.V), f.raw(x.LSE), f.raw(x.Workspace), f.out(x.Out)
		return func() error { return d.inner.AttentionForward(d.host, &x) }
	})
}

func (d *Device) AttentionBackward(s device.Stream, a *device.AttentionGrad) error {
	x := *a
	x.Attention = attention(&a.Attention)
	all := tensors{x.Q, x.K, x.V, x.Out, x.LSE, x.Workspace, x.DOut, x.DQ, x.DK, x.DV}
	return d.enqueue(s, "AttentionBackward", all, func(f *frame) func() error {
		x.Q, x.K, x.V, x.Out, x.LSE, x.Workspace = f.in(x.Q), f.in(x.K), f.in(x.V), f.in(x.Out), f.raw(x.LSE), f.raw(x.Workspace)
		x.DOut, x.DQ, x.DK, x.DV = f.in(x.DOut), f.out(x.DQ), f.out(x.DK), f.out(x.DV)
		return func() error { return d.inner.AttentionBackward(d.host, &x) }
	})
}

func (d *Device) AdamW(s device.Stream, a *device.AdamW) error {
	x := *a
	x.Decay = slices.Clone(a.Decay)
	return d.enqueue(s, "AdamW", tensors{x.W, x.G, x.M, x.V, x.Low}, func(f *frame) func() error {
		x.W, x.G, x.M, x.V, x.Low = f.raw(x.W), f.raw(x.G), f.raw(x.M), f.raw(x.V), f.raw(x.Low)
		return func() error { return d.inner.AdamW(d.host, &x) }
	})
}

func (d *Device) SGD(s device.Stream, a *device.SGD) error {
	x := *a
	x.Decay = slices.Clone(a.Decay)
	return d.enqueue(s, "SGD", tensors{x.W, x.G, x.Low}, func(f *frame) func() error {
		x.W, x.G, x.Low = f.raw(x.W), f.raw(x.G), f.raw(x.Low)
		return func() error { return d.inner.SGD(d.host, &x) }
	})
}
