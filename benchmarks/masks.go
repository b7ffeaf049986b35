package main

import (
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// masks times attention with masks and options on the CPU, forward and backward. The rate counts
// the pairs of queries and keys that are kept, so it is constant if time is proportional to them.
func masks(o *options) error {
	return o.onCPU(o.threads, o.cases.Masks, func(d device.Device, stream device.Stream, s shape) error {
		var g device.AttentionGrad
		free, err := build(d, func(a arena) {
			g = attentionTensors(d, a, s, o.compute)
			s.mask(a, &g)
			g.Workspace = a.alloc(tensor.U8,
				max(d.AttentionWorkspace(&g.Attention, false), d.AttentionWorkspace(&g.Attention, true)))
		})
		if err != nil {
			return err
		}
		defer free()
		if err := o.fillMask(d, stream, s, &g); err != nil {
			return err
		}
		forward := func() error { return d.AttentionForward(stream, &g.Attention) }
		pairs := s.kept()
		for _, x := range []struct {
			op   string
			call func() error
			work float64
		}{{"forward", forward, 1},
			{"forward+backward", inOrder(forward, func() error { return d.AttentionBackward(stream, &g) }), 3.5}} {
			times, err := measure(o.repeat, nil, x.call)
			if err != nil {
				return err
			}
			name := s.Name
			if x.op == "forward" {
				name += "-forward"
			}
			emit(name, times, "gflops", x.work*4*pairs*float64(s.Heads*s.HeadDim),
				map[string]any{"op": x.op, "threads": o.threads, "kernels": d.Info().Kernels, "kept_pairs": pairs})
		}
		return nil
	})
}

// mask sets the masks and options of a case, without the contents of tensors.
func (s shape) mask(a arena, g *device.AttentionGrad) {
	heads := func() tensor.Tensor { return a.alloc(tensor.F32, s.Heads) }
	if s.Window > 0 {
		g.Window = &device.Window{Left: s.Window - 1, Right: -1}
	}
	g.Softcap, g.Deterministic = s.Softcap, s.Deterministic
	if s.Slope != 0 {
		g.Slopes, g.DSlopes = heads(), heads()
	}
	if s.Sinks {
		g.Sinks, g.DSinks = heads(), heads()
	}
	if s.Block > 0 {
		n := s.Tokens / s.Block
		g.BlockMask = a.alloc(tensor.U8, 1, n, n)
		g.BlockRows, g.BlockColumns, g.QuerySeq, g.KeySeq = s.Block, s.Block, s.Tokens, s.Tokens
	}
}

// fillMask writes the contents of the tensors that mask has allocated.
func (o *options) fillMask(d device.Device, stream device.Stream, s shape, g *device.AttentionGrad) error {
	if o.expected {
		return nil
	}
	for _, x := range []struct {
		t     tensor.Tensor
		value float64
	}{{g.Slopes, s.Slope}, {g.Sinks, 1}, {g.DSlopes, 0}, {g.DSinks, 0}} {
		if !x.t.IsNil() {
			if err := d.Fill(stream, x.t, x.value); err != nil {
				return err
			}
		}
	}
	if s.Block > 0 {
		n := s.Tokens / s.Block
		keeps := make([]uint8, n*n)
		for i := range keeps {
			keeps[i] = s.keeps(int64(i)/n, int64(i)%n)
		}
		if err := d.Copy(stream, g.BlockMask, tensor.Of(unsafe.Pointer(&keeps[0]), tensor.U8, 1, n, n)); err != nil {
			return err
		}
	}
	return stream.Sync()
}

// keeps returns 1 if the block mask of a case keeps a block.
func (s shape) keeps(i, j int64) uint8 {
	if i == j || (i+j)%s.Every == 0 {
		return 1
	}
	return 0
}

// kept returns the number of pairs of queries and keys that a causal case keeps.
func (s shape) kept() (pairs float64) {
	for i := range s.Tokens {
		switch {
		case s.Window > 0:
			pairs += float64(min(i+1, s.Window))
		case s.Block > 0:
			for j := int64(0); j <= i/s.Block; j++ {
				pairs += float64(s.keeps(i/s.Block, j)) * float64(min(s.Block, i+1-j*s.Block))
			}
		default:
			pairs += float64(i + 1)
		}
	}
	return pairs
}
