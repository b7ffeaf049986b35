package cuda

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
)

// grouped are calls with their own memory. Some of them do not fit a group: a conversion, a
// transpose, a copy of five axes, heads whose vectors are not aligned.
type grouped struct {
	memory tensor.Tensor
	calls  []func() error
}

// newGrouped makes n calls of all kinds. The memory has the same content for the same seed.
func newGrouped(b *bench, n int) *grouped {
	const room = 1 << 16
	random := rand.New(rand.NewPCG(1, 2))
	content := make([]byte, 4*room)
	for i := range len(content) / 4 {
		binary.LittleEndian.PutUint32(content[4*i:], math.Float32bits(float32(random.NormFloat64())))
	}
	g := &grouped{memory: b.put(content, 0, tensor.U8, int64(len(content)))}
	used := int64(0)
	take := func(d tensor.DType, shape ...int64) tensor.Tensor {
		x := tensor.Of(nil, d, shape...)
		at := used
		used += (x.Bytes() + 255) / 256 * 256
		return g.memory.At(at, d, shape...)
	}
	type options struct {
		dtype      tensor.DType
		norm, back bool
		dim        int64
	}
	rope := func(o options) {
		const tokens, heads = 3, 2
		r := &device.Rope{X: take(o.dtype, tokens, heads+1, o.dim).Slice(1, 0, heads),
			Y: take(o.dtype, heads, tokens, o.dim).Permute(1, 0, 2), Cos: take(tensor.F32, tokens, 8),
			Sin: take(tensor.F32, tokens, 8), Inverse: o.back}
		if o.norm {
			r.W, r.RStd, r.Eps = take(o.dtype, o.dim), take(tensor.F32, tokens, heads+1).Slice(1, 0, heads), 1e-6
		}
		g.calls = append(g.calls, func() error { return b.d.Rope(b.s, r) })
	}
	copies := func(dst, src tensor.Tensor) {
		g.calls = append(g.calls, func() error { return b.d.Copy(b.s, dst, src) })
	}
	for i := range n {
		switch i % 11 {
		case 0:
			copies(take(tensor.BF16, 3, 5, 16), take(tensor.BF16, 5, 4, 16).Slice(1, 1, 4).Permute(1, 0, 2))
		case 1:
			copies(take(tensor.F32, 2, 7, 5), take(tensor.F32, 7, 2, 6).Slice(2, 1, 6).Permute(1, 0, 2))
		case 2:
			copies(take(tensor.BF16, 2, 3, 4, 8), take(tensor.BF16, 3, 4, 2, 8).Permute(2, 0, 1, 3))
		case 3:
			rope(options{dtype: tensor.BF16, dim: 24})
		case 4:
			rope(options{dtype: tensor.BF16, dim: 16, norm: true})
		case 5:
			copies(take(tensor.U8, 33), take(tensor.U8, 33))
		case 6:
			copies(take(tensor.BF16, 9, 3), take(tensor.F32, 9, 3))
		case 7:
			rope(options{dtype: tensor.F32, dim: 16, back: true})
		case 8:
			copies(take(tensor.BF16, 20, 20), take(tensor.BF16, 20, 20).Permute(1, 0))
		case 9:
			copies(take(tensor.BF16, 2, 2, 2, 2, 8),
				take(tensor.BF16, 3, 3, 3, 3, 9).Slice(0, 0, 2).Slice(1, 0, 2).Slice(2, 0, 2).Slice(3, 0,
					2).Slice(4, 0, 8))
		case 10:
			rope(options{dtype: tensor.BF16, dim: 17})
		}
	}
	if used > g.memory.Bytes() {
		b.t.Fatalf("%d bytes of %d", used, g.memory.Bytes())
	}
	return g
}

func (g *grouped) run() error {
	for i, call := range g.calls {
		if err := call(); err != nil {
			return fmt.Errorf("call %d: %w", i, err)
		}
	}
	return nil
}

// TestGroups: calls in a group give the bits of the same calls outside of a group, whether they are
// few or more than a launch takes.
func TestGroups(t *testing.T) {
	logLaunches(t)
	for _, n := range []int{1, 11, 100} {
		b := newBench(t)
		alone, together := newGrouped(b, n), newGrouped(b, n)
		b.must(alone.run())
		b.must(device.Grouped(b.s, together.run))
		if !slices.Equal(b.get(alone.memory), b.get(together.memory)) {
			t.Errorf("%d calls in a group have other results", n)
		}
	}
}

// TestGroupOrder: an operation that is no copy sees the copies of its group before it. An event
// that is recorded in a group follows the copies before it.
func TestGroupOrder(t *testing.T) {
	b := newBench(t)
	x := b.put(bytesOfFloats(1, 2, 3, 4), 0, tensor.F32, 4)
	y, z, w := b.put(make([]byte, 16), 0, tensor.F32, 4), b.put(make([]byte, 16), 0, tensor.F32, 4),
		b.put(make([]byte, 16), 0, tensor.F32, 4)
	e, err := b.d.NewEvent()
	b.must(err)
	defer e.Close()
	b.must(device.Grouped(b.s, func() error {
		b.must(b.d.Copy(b.s, y, x))
		b.must(b.d.Add(b.s, z, y, y))
		return b.d.Copy(b.s, w, z)
	}))
	if got := b.get(w); !slices.Equal(got, bytesOfFloats(2, 4, 6, 8)) {
		t.Errorf("%v after copy, add, copy", got)
	}
	other, err := b.d.NewStream()
	b.must(err)
	defer other.Close()
	b.must(b.s.Group(true))
	b.must(b.d.Copy(b.s, z, x))
	b.must(b.s.Record(e))
	b.must(other.Wait(e))
	got := make([]byte, 16)
	b.must(b.d.Copy(other, host(got, tensor.F32, 4), z))
	b.must(other.Sync())
	b.must(b.s.Group(false))
	if !slices.Equal(got, bytesOfFloats(1, 2, 3, 4)) {
		t.Errorf("%v behind an event in a group", got)
	}
}

// TestGroupOfHostCopies: copies between host memory and strided device memory, which share the
// scratch of the stream, keep their content in a group.
func TestGroupOfHostCopies(t *testing.T) {
	b := newBench(t)
	memory := b.put(make([]byte, 1<<10), 0, tensor.F32, 4, 8, 8)
	at := func(k int) tensor.Tensor { return memory.Select(0, int64(k)).Slice(1, 0, 2) }
	var sent, got [4][]byte
	b.must(device.Grouped(b.s, func() error {
		for k := range sent {
			sent[k] = bytes.Repeat([]byte{byte(k + 1)}, 64)
			if err := b.d.Copy(b.s, at(k), host(sent[k], tensor.F32, 8, 2)); err != nil {
				return err
			}
		}
		return nil
	}))
	b.must(b.s.Sync())
	b.must(device.Grouped(b.s, func() error {
		for k := range got {
			got[k] = make([]byte, 64)
			if err := b.d.Copy(b.s, host(got[k], tensor.F32, 8, 2), at(k)); err != nil {
				return err
			}
		}
		return nil
	}))
	b.must(b.s.Sync())
	for k := range got {
		if !bytes.Equal(got[k], sent[k]) {
			t.Errorf("copy %d: %v, want %v", k, got[k], sent[k])
		}
	}
}

func bytesOfFloats(x ...float32) (b []byte) {
	for _, v := range x {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

// TestGroupLaunches: a group is one launch for 28 calls.
func TestGroupLaunches(t *testing.T) {
	x := newShaped(t, needEmulated(t), 64, true)
	a, b := x.alloc(tensor.BF16, 100, 4, 16), x.alloc(tensor.BF16, 100, 16, 4, 16)
	for _, c := range []struct{ calls, launches int }{{1, 1}, {28, 1}, {29, 2}, {100, 4}} {
		all := x.launches(func() error {
			return device.Grouped(x.s, func() error {
				for i := range int64(c.calls) {
					if err := x.d.Copy(x.s, a.Select(0, i), b.Select(0, i).Select(0, 3)); err != nil {
						return err
					}
				}
				return nil
			})
		})
		if len(all) != c.launches || !strings.HasPrefix(all[0].name, "moves_kernel") {
			t.Errorf("%d calls are %d launches, want %d: %v", c.calls, len(all), c.launches, all)
		}
	}
}
