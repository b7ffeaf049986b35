package fake

import (
	"slices"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// tensors are those of a call, in a copy of its arguments.
type tensors = []*tensor.Tensor

// enqueue puts an operation into a stream. Tensors are looked at now, as a device's argument checks
// would; when the stream comes to it they are put where the CPU finds their memory, and it runs.
func (d *Device) enqueue(s device.Stream, op string, all tensors, run func() error) error {
	x, ok := s.(*stream)
	if !ok || x.d != d {
		return status.Errorf(status.InvalidArgument, "fake.%s: a stream of another device", op)
	}
	for _, t := range all {
		if _, err := d.real(*t); err != nil {
			return status.Errorf(status.Of(err), "fake.%s: %w", op, err)
		}
		if t.DType == tensor.BF16 && !slices.Contains(d.options.Compute, tensor.BF16) {
			return status.Errorf(status.Unsupported, "fake.%s: %v: this device computes in %v", op, *t, d.options.Compute)
		}
	}
	x.queue = append(x.queue, task{run: func() error {
		var err error
		for _, t := range all {
			if err == nil {
				*t, err = d.real(*t)
			}
		}
		if err == nil {
			err = run()
		}
		if err != nil {
			return status.Errorf(status.Of(err), "fake.%s: %w", op, err)
		}
		return nil
	}})
	return nil
}

// Copy reads and writes host memory when the stream comes to it: the caller must leave it alone
// until then. Until then a destination on the host holds what must not be read.
func (d *Device) Copy(s device.Stream, dst, src tensor.Tensor) error {
	var here tensors
	for _, t := range []*tensor.Tensor{&dst, &src} {
		if t.Where == tensor.Host && !t.Contiguous() {
			return status.Errorf(status.InvalidArgument, "fake.Copy: %v into %v: memory of the host must be dense", src, dst)
		}
		if t.Where != tensor.Host {
			here = append(here, t)
		}
	}
	if dst.Where == tensor.Host && dst.Numel() > 0 {
		for i, raw := 0, dst.RawBytes(); i < len(raw); i++ {
			raw[i] = 0xff
		}
	}
	return d.enqueue(s, "Copy", here, func() error { return d.inner.Copy(d.host, dst, src) })
}

func (d *Device) Fill(s device.Stream, dst tensor.Tensor, value float64) error {
	return d.enqueue(s, "Fill", tensors{&dst}, func() error { return d.inner.Fill(d.host, dst, value) })
}

func (d *Device) Add(s device.Stream, dst, a, b tensor.Tensor) error {
	return d.enqueue(s, "Add", tensors{&dst, &a, &b}, func() error { return d.inner.Add(d.host, dst, a, b) })
}

func (d *Device) Scale(s device.Stream, x tensor.Tensor, by float64) error {
	return d.enqueue(s, "Scale", tensors{&x}, func() error { return d.inner.Scale(d.host, x, by) })
}

func (d *Device) ColumnSum(s device.Stream, dst, x tensor.Tensor) error {
	return d.enqueue(s, "ColumnSum", tensors{&dst, &x}, func() error { return d.inner.ColumnSum(d.host, dst, x) })
}

func (d *Device) Sum(s device.Stream, out, x tensor.Tensor) error {
	return d.enqueue(s, "Sum", tensors{&out, &x}, func() error { return d.inner.Sum(d.host, out, x) })
}

func (d *Device) SumSquares(s device.Stream, out, x tensor.Tensor) error {
	return d.enqueue(s, "SumSquares", tensors{&out, &x}, func() error { return d.inner.SumSquares(d.host, out, x) })
}

func (d *Device) Gemm(s device.Stream, a *device.Gemm) error {
	x := *a
	return d.enqueue(s, "Gemm", tensors{&x.A, &x.B, &x.C, &x.Bias}, func() error { return d.inner.Gemm(d.host, &x) })
}

func (d *Device) RMSNormForward(s device.Stream, a *device.RMSNorm) error {
	x := *a
	return d.enqueue(s, "RMSNormForward", tensors{&x.X, &x.W, &x.Y, &x.RStd}, func() error { return d.inner.RMSNormForward(d.host, &x) })
}

func (d *Device) RMSNormBackward(s device.Stream, a *device.RMSNormGrad) error {
	x := *a
	return d.enqueue(s, "RMSNormBackward", tensors{&x.X, &x.W, &x.RStd, &x.DY, &x.DX, &x.DW}, func() error { return d.inner.RMSNormBackward(d.host, &x) })
}

func (d *Device) RopeTable(s device.Stream, a *device.RopeTable) error {
	x := *a
	return d.enqueue(s, "RopeTable", tensors{&x.Positions, &x.Freq, &x.Cos, &x.Sin}, func() error { return d.inner.RopeTable(d.host, &x) })
}

func (d *Device) Rope(s device.Stream, a *device.Rope) error {
	x := *a
	return d.enqueue(s, "Rope", tensors{&x.X, &x.Y, &x.Cos, &x.Sin, &x.W, &x.RStd}, func() error { return d.inner.Rope(d.host, &x) })
}

func (d *Device) SwiGLUForward(s device.Stream, a *device.SwiGLU) error {
	x := *a
	return d.enqueue(s, "SwiGLUForward", tensors{&x.Gate, &x.Up, &x.Y}, func() error { return d.inner.SwiGLUForward(d.host, &x) })
}

func (d *Device) SwiGLUBackward(s device.Stream, a *device.SwiGLUGrad) error {
	x := *a
	return d.enqueue(s, "SwiGLUBackward", tensors{&x.Gate, &x.Up, &x.DY, &x.DGate, &x.DUp}, func() error { return d.inner.SwiGLUBackward(d.host, &x) })
}

func (d *Device) EmbeddingForward(s device.Stream, a *device.Embedding) error {
	x := *a
	return d.enqueue(s, "EmbeddingForward", tensors{&x.Table, &x.IDs, &x.Y}, func() error { return d.inner.EmbeddingForward(d.host, &x) })
}

func (d *Device) EmbeddingBackward(s device.Stream, a *device.EmbeddingGrad) error {
	x := *a
	return d.enqueue(s, "EmbeddingBackward", tensors{&x.IDs, &x.DY, &x.DTable}, func() error { return d.inner.EmbeddingBackward(d.host, &x) })
}

func (d *Device) CrossEntropy(s device.Stream, a *device.CrossEntropy) error {
	x := *a
	return d.enqueue(s, "CrossEntropy", tensors{&x.Logits, &x.Targets, &x.NLL, &x.DLogits}, func() error { return d.inner.CrossEntropy(d.host, &x) })
}
