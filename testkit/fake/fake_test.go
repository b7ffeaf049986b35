package fake

import (
	"math"
	"slices"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

func must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}

func open(t *testing.T, o Options) *Device {
	d := must(Open(o))
	t.Cleanup(d.Close)
	return d
}

func (d *Device) tensor(dtype tensor.DType, shape ...int64) tensor.Tensor {
	x := tensor.Of(nil, dtype, shape...)
	b := must(d.Alloc(x.Bytes()))
	x.Data, x.Where = b.Pointer(), tensor.CUDA
	return x
}

// Streams run in any order unless events order them: over many seeds, both orders occur without an
// event, and one with it.
func TestOrderIsRandomButForEvents(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		seen := map[float32]int{}
		for seed := range uint64(40) {
			d := open(t, Options{Seed: seed})
			a, b, e := must(d.NewStream()), must(d.NewStream()), must(d.NewEvent())
			x := d.tensor(tensor.F32, 1)
			_ = d.Fill(a, x, 1)
			_ = d.Scale(a, x, 2)
			_ = a.Record(e)
			if ordered {
				_ = b.Wait(e)
			}
			_ = d.Fill(b, x, 5)
			if err := a.Sync(); err != nil {
				t.Fatal(err)
			}
			got := make([]float32, 1)
			_ = d.Copy(b, tensor.OfFloat32(got, 1), x)
			if !math.IsNaN(float64(got[0])) {
				t.Fatalf("a copy to the host was complete before Sync: %v", got[0])
			}
			if err := b.Sync(); err != nil {
				t.Fatal(err)
			}
			seen[got[0]]++
		}
		if ordered && (len(seen) != 1 || seen[5] == 0) || !ordered && len(seen) < 2 {
			t.Errorf("ordered %v: %v", ordered, seen)
		}
	}
}

// Argument structs and their lists may be changed after the call, host tensors may not.
func TestArgumentsAreTheCallers(t *testing.T) {
	d := open(t, Options{})
	s := must(d.NewStream())
	x := d.tensor(tensor.F32, 3)
	host := []float32{1, 2, 3}
	_ = d.Copy(s, x, tensor.OfFloat32(host, 3))
	host[1] = 7
	a := &device.SGD{W: x, G: x, LR: 1, WeightDecay: 0.5, GradScale: 0, Decay: []device.Range{{Lo: 0, Hi: 1}}}
	_ = d.SGD(s, a)
	a.Decay[0], a.LR = device.Range{Lo: 2, Hi: 3}, 0
	got := make([]float32, 3)
	_ = d.Copy(s, tensor.OfFloat32(got, 3), x)
	if err := s.Sync(); err != nil || !slices.Equal(got, []float32{0.5, 7, 3}) {
		t.Errorf("%v, %v", got, err)
	}
}

// Operations on BF16 compute in F32 and round once.
func TestBF16(t *testing.T) {
	d := open(t, Options{})
	s := must(d.NewStream())
	a, b := d.tensor(tensor.BF16, 2, 2), d.tensor(tensor.BF16, 2, 2)
	_ = d.Copy(s, a, tensor.OfFloat32([]float32{1, 2, 3, 1.0 / 256}, 2, 2))
	_ = d.Copy(s, b, tensor.OfFloat32([]float32{1, 1, 1, 1}, 2, 2))
	wide, low, got := d.tensor(tensor.F32, 2, 2), d.tensor(tensor.BF16, 2, 2), make([]float32, 4)
	for _, x := range []struct {
		c    tensor.Tensor
		want []float32
	}{{wide, []float32{3, 3, 3 + 1.0/256, 3 + 1.0/256}}, {low, []float32{3, 3, 3, 3}}} {
		_ = d.Gemm(s, &device.Gemm{A: a, B: b.Permute(1, 0), C: x.c})
		_ = d.Copy(s, tensor.OfFloat32(got, 2, 2), x.c)
		if err := s.Sync(); err != nil || !slices.Equal(got, x.want) {
			t.Errorf("%v: %v, want %v (%v)", x.c, got, x.want, err)
		}
	}
}

// Calls that would crash a GPU return errors.
func TestRefusals(t *testing.T) {
	d := open(t, Options{Memory: 1 << 20, Compute: []tensor.DType{tensor.F32}})
	s := must(d.NewStream())
	x := d.tensor(tensor.F32, 4)
	outside := x
	outside.Shape[0] = 5
	for want, err := range map[string]error{
		"host memory":                d.Fill(s, tensor.OfFloat32(make([]float32, 4), 4), 0),
		"one allocation":             d.Fill(s, outside, 0),
		"computes in":                d.Fill(s, d.tensor(tensor.BF16, 4), 0),
		"a stream of another device": d.Fill(nil, x, 0),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if _, err := d.Alloc(1 << 20); status.Of(err) != status.OutOfMemory {
		t.Errorf("an allocation above the limit: %v", err)
	}
	_ = d.Add(s, x, x, d.tensor(tensor.F32, 3))
	if err := s.Sync(); err == nil || s.Sync() == nil {
		t.Error("Sync does not return the error of a failed operation, or not every time")
	}
}
