package fake

import (
	"slices"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// frame is one operation as it runs: it finds the tensors' memory, widens BF16 to F32 and rounds results back.
type frame struct {
	d    *Device
	err  error
	back []func() error
}

// raw is memory in the type that it has.
func (f *frame) raw(t tensor.Tensor) tensor.Tensor {
	t, err := f.d.real(t)
	if f.err == nil {
		f.err = err
	}
	return t
}

// in is an input, in F32.
func (f *frame) in(t tensor.Tensor) tensor.Tensor {
	t = f.raw(t)
	if t.DType != tensor.BF16 || f.err != nil {
		return t
	}
	wide := tensor.OfFloat32(make([]float32, t.Numel()), t.Dims()...)
	f.err = f.d.inner.Copy(f.d.host, wide, t)
	return wide
}

// out is a result, in F32.
func (f *frame) out(t tensor.Tensor) tensor.Tensor {
	t = f.raw(t)
	if t.DType != tensor.BF16 || f.err != nil {
		return t
	}
	wide := tensor.OfFloat32(make([]float32, t.Numel()), t.Dims()...)
	f.back = append(f.back, func() error { return f.d.inner.Copy(f.d.host, t, wide) })
	return wide
}

// inOut is read and written.
func (f *frame) inOut(t tensor.Tensor) tensor.Tensor {
	wide := f.out(t)
	if t.DType == tensor.BF16 && f.err == nil {
		f.err = f.d.inner.Copy(f.d.host, wide, f.raw(t))
	}
	return wide
}

// enqueue puts an operation into a stream. Tensors are looked at now, as a device's argument checks would; prepare runs when the stream
// comes to it, and returns the operation on memory that the CPU can use.
func (d *Device) enqueue(s device.Stream, op string, tensors []tensor.Tensor, prepare func(f *frame) func() error) error {
	x, ok := s.(*stream)
	if !ok || x.d != d {
		return status.Errorf(status.InvalidArgument, "fake.%s: a stream of another device", op)
	}
	for _, t := range tensors {
		if _, err := d.real(t); err != nil {
			return status.Errorf(status.Of(err), "fake.%s: %w", op, err)
		}
		if t.DType == tensor.BF16 && !slices.Contains(d.options.Compute, tensor.BF16) {
			return status.Errorf(status.Unsupported, "fake.%s: %v: this device computes in %v", op, t, d.options.Compute)
		}
	}
	x.queue = append(x.queue, task{run: func() error {
		f := &frame{d: d}
		run := prepare(f)
		if f.err == nil {
			f.err = run()
		}
		for _, back := range f.back {
			if f.err == nil {
				f.err = back()
			}
		}
		if f.err != nil {
			return status.Errorf(status.Of(f.err), "fake.%s: %w", op, f.err)
		}
		return nil
	}})
	return nil
}

type tensors = []tensor.Tensor

// Copy reads and writes host memory when the stream comes to it: the caller must leave it alone until then. Until then a destination on
// the host holds what must not be read.
func (d *Device) Copy(s device.Stream, dst, src tensor.Tensor) error {
	var here tensors
	for _, t := range []tensor.Tensor{dst, src} {
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
	usable := func(f *frame, t tensor.Tensor) tensor.Tensor {
		if t.Where == tensor.Host {
			return t
		}
		return f.raw(t)
	}
	return d.enqueue(s, "Copy", here, func(f *frame) func() error {
		to, from := usable(f, dst), usable(f, src)
		return func() error { return d.inner.Copy(d.host, to, from) }
	})
}

func (d *Device) Fill(s device.Stream, dst tensor.Tensor, value float64) error {
	return d.enqueue(s, "Fill", tensors{dst}, func(f *frame) func() error {
		x := f.raw(dst)
		return func() error { return d.inner.Fill(d.host, x, value) }
	})
}

func (d *Device) Add(s device.Stream, dst, a, b tensor.Tensor) error {
	return d.enqueue(s, "Add", tensors{dst, a, b}, func(f *frame) func() error {
		x, y, z := f.in(a), f.in(b), f.out(dst)
		return func() error { return d.inner.Add(d.host, z, x, y) }
	})
}

func (d *Device) Scale(s device.Stream, x tensor.Tensor, by float64) error {
	return d.enqueue(s, "Scale", tensors{x}, func(f *frame) func() error {
		y := f.inOut(x)
		return func() error { return d.inner.Scale(d.host, y, by) }
	})
}

func (d *Device) ColumnSum(s device.Stream, dst, x tensor.Tensor) error {
	return d.enqueue(s, "ColumnSum", tensors{dst, x}, func(f *frame) func() error {
		y, z := f.in(x), f.raw(dst)
		return func() error { return d.inner.ColumnSum(d.host, z, y) }
	})
}

func (d *Device) Sum(s device.Stream, out, x tensor.Tensor) error {
	return d.enqueue(s, "Sum", tensors{out, x}, func(f *frame) func() error {
		y, z := f.raw(x), f.raw(out)
		return func() error { return d.inner.Sum(d.host, z, y) }
	})
}

func (d *Device) SumSquares(s device.Stream, out, x tensor.Tensor) error {
	return d.enqueue(s, "SumSquares", tensors{out, x}, func(f *frame) func() error {
		y, z := f.raw(x), f.raw(out)
		return func() error { return d.inner.SumSquares(d.host, z, y) }
	})
}

func (d *Device) Gemm(s device.Stream, a *device.Gemm) error {
	x := *a
	return d.enqueue(s, "Gemm", tensors{x.A, x.B, x.C, x.Bias}, func(f *frame) func() error {
		c := f.out
		if x.Accumulate {
			c = f.inOut
		}
		x.A, x.B, x.Bias, x.C = f.in(x.A), f.in(x.B), f.in(x.Bias), c(x.C)
		return func() error { return d.inner.Gemm(d.host, &x) }
	})
}

func (d *Device) RMSNormForward(s device.Stream, a *device.RMSNorm) error {
	x := *a
	return d.enqueue(s, "RMSNormForward", tensors{x.X, x.W, x.Y, x.RStd}, func(f *frame) func() error {
		x.X, x.W, x.RStd, x.Y = f.in(x.X), f.in(x.W), f.raw(x.RStd), f.out(x.Y)
		return func() error { return d.inner.RMSNormForward(d.host, &x) }
	})
}

func (d *Device) RMSNormBackward(s device.Stream, a *device.RMSNormGrad) error {
	x := *a
	return d.enqueue(s, "RMSNormBackward", tensors{x.X, x.W, x.RStd, x.DY, x.DX, x.DW}, func(f *frame) func() error {
		dx := f.out
		if x.AddDX {
			dx = f.inOut
		}
		x.X, x.W, x.RStd, x.DY, x.DW, x.DX = f.in(x.X), f.in(x.W), f.raw(x.RStd), f.in(x.DY), f.raw(x.DW), dx(x.DX)
		return func() error { return d.inner.RMSNormBackward(d.host, &x) }
	})
}

func (d *Device) RopeTable(s device.Stream, a *device.RopeTable) error {
	x := *a
	return d.enqueue(s, "RopeTable", tensors{x.Positions, x.Freq, x.Cos, x.Sin}, func(f *frame) func() error {
		x.Positions, x.Freq, x.Cos, x.Sin = f.raw(x.Positions), f.raw(x.Freq), f.raw(x.Cos), f.raw(x.Sin)
		return func() error { return d.inner.RopeTable(d.host, &x) }
	})
}

func (d *Device) Rope(s device.Stream, a *device.Rope) error {
	x := *a
	return d.enqueue(s, "Rope", tensors{x.X, x.Y, x.Cos, x.Sin}, func(f *frame) func() error {
		x.X, x.Cos, x.Sin, x.Y = f.in(x.X), f.raw(x.Cos), f.raw(x.Sin), f.out(x.Y)
		return func() error { return d.inner.Rope(d.host, &x) }
	})
}

func (d *Device) SwiGLUForward(s device.Stream, a *device.SwiGLU) error {
	x := *a
	return d.enqueue(s, "SwiGLUForward", tensors{x.Gate, x.Up, x.Y}, func(f *frame) func() error {
		x.Gate, x.Up, x.Y = f.in(x.Gate), f.in(x.Up), f.out(x.Y)
		return func() error { return d.inner.SwiGLUForward(d.host, &x) }
	})
}

func (d *Device) SwiGLUBackward(s device.Stream, a *device.SwiGLUGrad) error {
	x := *a
	return d.enqueue(s, "SwiGLUBackward", tensors{x.Gate, x.Up, x.DY, x.DGate, x.DUp}, func(f *frame) func() error {
		x.Gate, x.Up, x.DY, x.DGate, x.DUp = f.in(x.Gate), f.in(x.Up), f.in(x.DY), f.out(x.DGate), f.out(x.DUp)
		return func() error { return d.inner.SwiGLUBackward(d.host, &x) }
	})
}

func (d *Device) EmbeddingForward(s device.Stream, a *device.Embedding) error {
	x := *a
	return d.enqueue(s, "EmbeddingForward", tensors{x.Table, x.IDs, x.Y}, func(f *frame) func() error {
		x.Table, x.IDs, x.Y = f.in(x.Table), f.raw(x.IDs), f.out(x.Y)
		return func() error { return d.inner.EmbeddingForward(d.host, &x) }
	})
}

func (d *Device) EmbeddingBackward(s device.Stream, a *device.EmbeddingGrad) error {
	x := *a
	return d.enqueue(s, "EmbeddingBackward", tensors{x.IDs, x.DY, x.DTable}, func(f *frame) func() error {
		x.IDs, x.DY, x.DTable = f.raw(x.IDs), f.in(x.DY), f.raw(x.DTable)
		return func() error { return d.inner.EmbeddingBackward(d.host, &x) }
	})
}

func (d *Device) CrossEntropy(s device.Stream, a *device.CrossEntropy) error {
	x := *a
	return d.enqueue(s, "CrossEntropy", tensors{x.Logits, x.Targets, x.NLL, x.DLogits}, func(f *frame) func() error {
		x.Logits, x.Targets, x.NLL, x.DLogits = f.raw(x.Logits), f.raw(x.Targets), f.raw(x.NLL), f.out(x.DLogits)
		return func() error { return d.inner.CrossEntropy(d.host, &x) }
	})
}
