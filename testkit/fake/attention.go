package fake

import (
	"slices"

	"ulysses/device"
)

// AttentionWorkspace is the CPU's.
func (d *Device) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	x := *a
	onHost(&x.Q, &x.K, &x.V, &x.Out)
	return d.inner.AttentionWorkspace(&x, backward)
}

// attention copies the lists, which the caller may use again.
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
	return d.enqueue(s, "AttentionForward", tensors{&x.Q, &x.K, &x.V, &x.Out, &x.LSE, &x.Workspace},
		func() error { return d.inner.AttentionForward(d.host, &x) })
}

func (d *Device) AttentionBackward(s device.Stream, a *device.AttentionGrad) error {
	x := *a
	x.Attention = attention(&a.Attention)
	return d.enqueue(s, "AttentionBackward", tensors{&x.Q, &x.K, &x.V, &x.Out, &x.LSE, &x.Workspace, &x.DOut, &x.DQ, &x.DK, &x.DV},
		func() error { return d.inner.AttentionBackward(d.host, &x) })
}

func (d *Device) AdamW(s device.Stream, a *device.AdamW) error {
	x := *a
	x.Decay = slices.Clone(a.Decay)
	return d.enqueue(s, "AdamW", tensors{&x.W, &x.G, &x.M, &x.V, &x.Low}, func() error { return d.inner.AdamW(d.host, &x) })
}

func (d *Device) SGD(s device.Stream, a *device.SGD) error {
	x := *a
	x.Decay = slices.Clone(a.Decay)
	return d.enqueue(s, "SGD", tensors{&x.W, &x.G, &x.Low}, func() error { return d.inner.SGD(d.host, &x) })
}
