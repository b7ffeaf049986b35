package sp

import (
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// several is a device with several kernels. The gradient of the fast one is not reproducible. It
// records the arguments of its calls.
type several struct {
	device.Device
	deterministic []bool // of the operation, by call of an operation or of AttentionWorkspace
	shape         [][2]int64
}

func (d *several) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	d.deterministic = append(d.deterministic, a.Deterministic)
	return d.Device.AttentionWorkspace(a, backward)
}

func (d *several) AttentionForward(s device.Stream, a *device.Attention) error {
	d.deterministic = append(d.deterministic, a.Deterministic)
	return d.Device.AttentionForward(s, a)
}

func (d *several) AttentionBackward(s device.Stream, g *device.AttentionGrad) error {
	d.deterministic = append(d.deterministic, g.Deterministic)
	return d.Device.AttentionBackward(s, g)
}

func (d *several) AttentionKernel(a *device.Attention, backward bool) (string, error) {
	d.shape = append(d.shape, [2]int64{a.Q.Shape[1], a.K.Shape[1]})
	switch {
	case !a.Deterministic || !backward:
		return "quick", nil
	case a.Q.Shape[2] > 8 || a.V.Shape[2] > 8:
		return "", status.Errorf(status.Unsupported, "head sizes %d and %d", a.Q.Shape[2], a.V.Shape[2])
	}
	return "steady", nil
}

// A deterministic layer says so in every call. Kernels returns the kernels for all heads, also on
// ranks without heads.
func TestDeterministic(t *testing.T) {
	for _, deterministic := range []bool{false, true} {
		if err := comm.RunLocal(3, func(c comm.Comm) error {
			b := newBench()
			defer b.close()
			d := &several{Device: b.dev}
			b.dev = d
			l := Layer{Heads: 2, KVHeads: 1, Dim: 8, VDim: 4, Causal: true, Deterministic: deterministic}
			p, err := NewPlan(d, c, l)
			must(err)
			forward, backward, err := p.Kernels()
			if want := map[bool]string{false: "quick", true: "steady"}[deterministic]; err != nil ||
				forward != "quick" || backward != want {
				t.Errorf("deterministic %v: %q and %q, %v", deterministic, forward, backward, err)
			}
			for _, s := range d.shape {
				if s != [2]int64{2, 1} {
					t.Errorf("rank %d queried kernels for %v heads", c.Rank(), s)
				}
			}
			x, err := NewBatch(c, BatchSpec{Batch: 1, Seq: 7})
			must(err)
			size := p.Sizes(x)
			rows := x.Rows()
			a := Args{Q: b.tensor(1, rows, 2, 8), K: b.tensor(1, rows, 1, 8), V: b.tensor(1, rows, 1, 4),
				Out: b.tensor(1, rows, 2, 4), Saved: b.bytes(size.Saved), Workspace: b.bytes(size.Workspace)}
			g := Grads{DOut: b.tensor(1, rows, 2, 4), DQ: b.tensor(1, rows, 2, 8), DK: b.tensor(1, rows, 1, 8),
				DV: b.tensor(1, rows, 1, 4)}
			must(p.Forward(b.stream, x, &a))
			must(p.Backward(b.stream, x, &a, &g))
			if least := map[bool]int{false: 2, true: 4}[c.Rank() < 2]; len(d.deterministic) < least {
				t.Errorf("rank %d has %d calls", c.Rank(), len(d.deterministic))
			}
			for i, asked := range d.deterministic {
				if asked != deterministic {
					t.Errorf("call %d of rank %d: deterministic is %v", i, c.Rank(), asked)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}

// A layer without a kernel is an error with the reason. Without a backward pass, no backward kernel
// is needed. All ranks have the same result.
func TestKernels(t *testing.T) {
	if err := comm.RunLocal(2, func(c comm.Comm) error {
		b := newBench()
		defer b.close()
		d := &several{Device: b.dev}
		l := Layer{Heads: 2, KVHeads: 2, Dim: 9, VDim: 9, DType: tensor.F32, Deterministic: true}
		p, err := NewPlan(d, c, l)
		must(err)
		if _, _, err := p.Kernels(); status.Of(err) != status.Unsupported ||
			!strings.Contains(err.Error(), "head sizes 9 and 9") {
			t.Errorf("%v", err)
		}
		l.NoBackward = true
		p, err = NewPlan(d, c, l)
		must(err)
		if forward, backward, err := p.Kernels(); forward != "quick" || backward != "" || err != nil {
			t.Errorf("%q, %q, %v", forward, backward, err)
		}
		plain, err := NewPlan(b.dev, c, l)
		must(err)
		if forward, backward, err := plain.Kernels(); forward != "" || backward != "" || err != nil {
			t.Errorf("a device with one row: %q, %q, %v", forward, backward, err)
		}
		l.Deterministic = c.Rank() == 0
		if _, err := NewPlan(d, c, l); status.Of(err) != status.InvalidArgument ||
			!strings.Contains(err.Error(), "deterministic") {
			t.Errorf("ranks that differ: %v", err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
