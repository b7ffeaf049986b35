package sp

import (
	"fmt"
	"math"
	"os"
	"testing"
	"unsafe"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
)

func TestMain(m *testing.M) { os.Exit(mpitest.Main(m)) }

// bench has one rank's device and memory in a test. Failures panic: comm.RunLocal turns them into
// the test's error.
type bench struct {
	dev    device.Device
	stream device.Stream
	bufs   []device.Buffer
	gaps   []gap
}

// gap is a tensor inside a larger one. The elements between its rows must not change.
type gap struct{ outer, inner tensor.Tensor }

func newBench() *bench {
	d, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	return benchOn(d)
}

func benchOn(d device.Device) *bench {
	s, err := d.NewStream()
	must(err)
	return &bench{dev: d, stream: s}
}

// moved returns a copy of a dense host tensor in the device's memory, or the tensor itself on the
// CPU. nil gives nil.
func (b *bench) moved(host tensor.Tensor) tensor.Tensor {
	place := b.dev.Info().Place
	if host.IsNil() || place == host.Where {
		return host
	}
	buf, err := b.dev.Alloc(max(host.Bytes(), 1))
	must(err)
	b.bufs = append(b.bufs, buf)
	t := tensor.Of(buf.Pointer(), host.DType, host.Dims()...)
	t.Where = place
	must(b.dev.Copy(b.stream, t, host))
	must(b.stream.Sync())
	return t
}

// fetch copies what moved has returned back to the host.
func (b *bench) fetch(host, moved tensor.Tensor) {
	if host.IsNil() || host.Where == moved.Where {
		return
	}
	must(b.dev.Copy(b.stream, host, moved))
	must(b.stream.Sync())
}

// free releases the memory of all tensors.
func (b *bench) free() {
	for _, x := range b.bufs {
		x.Free()
	}
	b.bufs, b.gaps = nil, nil
}

func (b *bench) close() {
	b.free()
	b.stream.Close()
	b.dev.Close()
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// bytes allocates memory of the host that is filled with values that must not be read.
func (b *bench) bytes(n int64) tensor.Tensor {
	buf, err := hostMemory.Alloc(max(n, 1))
	must(err)
	b.bufs = append(b.bufs, buf)
	raw := unsafe.Slice((*byte)(buf.Pointer()), n)
	for i := range raw {
		raw[i] = 0xff // a NaN, as F32
	}
	return tensor.Of(buf.Pointer(), tensor.U8, n)
}

// hostMemory allocates the host's memory of all benches.
var hostMemory = func() device.Device {
	d, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	return d
}()

func (b *bench) tensor(shape ...int64) tensor.Tensor {
	t := tensor.Of(nil, tensor.F32, shape...)
	return b.bytes(t.Bytes()).At(0, tensor.F32, shape...)
}

// gapped allocates a tensor [B, n, H, D] inside a larger one: no two axes can be merged.
func (b *bench) gapped(n0, n1, n2, n3 int64) tensor.Tensor {
	outer := b.tensor(n0, n1+1, n2+1, n3+3)
	inner := outer.Slice(1, 0, n1).Slice(2, 0, n2).Slice(3, 0, n3)
	b.gaps = append(b.gaps, gap{outer, inner})
	return inner
}

// gapsIntact returns an error if elements between the rows of gapped tensors have changed.
func (b *bench) gapsIntact() (err error) {
	for _, g := range b.gaps {
		in := g.inner.Shape
		each(g.outer, func(n, i, h, d int64, x *float32) {
			if (i >= in[1] || h >= in[2] || d >= in[3]) && math.Float32bits(*x) != math.MaxUint32 && err == nil {
				err = fmt.Errorf("%v was written outside, at [%d, %d, %d, %d]", g.inner, n, i, h, d)
			}
		})
	}
	return err
}

// at returns the address of an element, with any strides.
func at(t tensor.Tensor, index ...int64) *float32 {
	o := int64(0)
	for i, x := range index {
		o += x * t.Stride[i]
	}
	return (*float32)(unsafe.Add(t.Data, o*4))
}

// value returns element (b, row, head, d) of a global tensor. Any rank can compute it.
func value(name uint64, index ...int64) float32 {
	h := name*0x9e3779b97f4a7c15 + 0x1234567
	for _, i := range index {
		h ^= uint64(i) + 0x632be59bd9b4e019
		h *= 0xff51afd7ed558ccd
		h ^= h >> 29
	}
	return float32(int64(h>>40)-1<<23) / (1 << 23) // [-1, 1)
}

// fill writes the rows of a rank, from lo on, of a global tensor. t is [B, n, H, D] and its head 0
// is head h0.
func fill(t tensor.Tensor, name uint64, lo, h0 int64) {
	each(t, func(b, i, h, d int64, x *float32) { *x = value(name, b, lo+i, h0+h, d) })
}

func each(t tensor.Tensor, f func(b, i, h, d int64, x *float32)) {
	for b := range t.Shape[0] {
		for i := range t.Shape[1] {
			for h := range t.Shape[2] {
				for d := range t.Shape[3] {
					f(b, i, h, d, at(t, b, i, h, d))
				}
			}
		}
	}
}

// sameBits compares this rank's rows, from lo on, bitwise with the rows of a whole tensor.
func sameBits(name string, got, whole tensor.Tensor, lo int64) (err error) {
	each(got, func(b, i, h, d int64, x *float32) {
		if want := *at(whole, b, lo+i, h, d); math.Float32bits(*x) != math.Float32bits(want) && err == nil {
			err = fmt.Errorf("%s[%d, %d, %d, %d] is %v, on one rank %v", name, b, lo+i, h, d, *x, want)
		}
	})
	return err
}

// alone returns a communicator of one rank.
func alone() comm.Comm { return comm.Local(1)[0] }

// layerCase is a layer and a batch with a special property.
type layerCase struct {
	name  string
	layer Layer
	batch BatchSpec
}

// positionsOf returns positions for document starts. Positions may jump inside of a document, which
// starts no document.
func positionsOf(cu []int64) []int64 {
	var p []int64
	for i, end := range cu[1:] {
		for t := cu[i]; t < end; t++ {
			at := t - cu[i]
			if at > 2 {
				at += 5
			}
			p = append(p, at)
		}
	}
	return p
}

var layerCases = []layerCase{
	{"even", Layer{Heads: 8, KVHeads: 8, Dim: 8, VDim: 8, Causal: true}, BatchSpec{Batch: 1, Seq: 64}},
	{"shared key heads", Layer{Heads: 8, KVHeads: 2, Dim: 16, VDim: 16, Causal: true}, BatchSpec{Batch: 1, Seq: 67}},
	{"one key head", Layer{Heads: 8, KVHeads: 1, Dim: 4, VDim: 4}, BatchSpec{Batch: 1, Seq: 33}},
	{"groups across ranks", Layer{Heads: 9, KVHeads: 3, Dim: 5, VDim: 5, Causal: true}, BatchSpec{Batch: 2, Seq: 29}},
	{"uneven heads", Layer{Heads: 6, KVHeads: 3, Dim: 12, VDim: 12, Causal: true}, BatchSpec{Batch: 1, Seq: 50}},
	{"fewer heads than ranks", Layer{Heads: 2, KVHeads: 1, Dim: 8, VDim: 8, Causal: true},
		BatchSpec{Batch: 1, Seq: 40}},
	{"one head", Layer{Heads: 1, KVHeads: 1, Dim: 8, VDim: 8, Causal: true}, BatchSpec{Batch: 1, Seq: 17}},
	{"one token", Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, Causal: true}, BatchSpec{Batch: 1, Seq: 1}},
	{"fewer tokens than ranks", Layer{Heads: 4, KVHeads: 4, Dim: 8, VDim: 8}, BatchSpec{Batch: 3, Seq: 3}},
	{"value heads wider", Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 20, Causal: true, Scale: 0.3},
		BatchSpec{Batch: 2, Seq: 31}},
	{"value heads of one", Layer{Heads: 3, KVHeads: 3, Dim: 7, VDim: 1}, BatchSpec{Batch: 1, Seq: 20}},
	{"documents", Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, Causal: true},
		BatchSpec{Batch: 1, Seq: 90, CuSeqlens: []int64{0, 1, 30, 31, 33, 80, 90}}},
	{"documents in rows", Layer{Heads: 6, KVHeads: 2, Dim: 8, VDim: 8, Causal: true},
		BatchSpec{Batch: 3, Seq: 20, CuSeqlens: []int64{0, 20, 25, 40, 41, 59, 60}}},
	{"documents by positions", Layer{Heads: 4, KVHeads: 4, Dim: 8, VDim: 8},
		BatchSpec{Batch: 2, Seq: 25, Positions: positionsOf([]int64{0, 10, 11, 25, 40, 50})}},
	{"more keys", Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, Causal: true}, BatchSpec{Batch: 2, Seq: 19, KVSeq: 45}},
	{"fewer keys", Layer{Heads: 4, KVHeads: 1, Dim: 8, VDim: 12, Causal: true}, BatchSpec{Batch: 1, Seq: 40, KVSeq: 5}},
	{"window", Layer{Heads: 6, KVHeads: 2, Dim: 8, VDim: 8, Causal: true, Window: &device.Window{Left: 5, Right: -1}},
		BatchSpec{Batch: 1, Seq: 90, CuSeqlens: []int64{0, 1, 30, 31, 33, 80, 90}}},
	{"window both ways", Layer{Heads: 4, KVHeads: 4, Dim: 8, VDim: 8, Window: &device.Window{Left: 7, Right: 3}},
		BatchSpec{Batch: 2, Seq: 19, KVSeq: 45}},
	{"documents across", Layer{Heads: 5, KVHeads: 5, Dim: 8, VDim: 8},
		BatchSpec{Batch: 2, Seq: 20, KVSeq: 10, CuSeqlens: []int64{0, 3, 20, 40}, CuSeqlensKV: []int64{0, 9, 10, 20}}},
}

// eachCase runs f on every case and number of ranks.
func eachCase(t *testing.T, f func(b *bench, c comm.Comm, lc layerCase) error) {
	for _, lc := range layerCases {
		t.Run(lc.name, func(t *testing.T) {
			for _, n := range mpitest.Sizes() {
				mpitest.Ranks(t, n, func(c comm.Comm) error {
					b := newBench()
					defer b.close()
					return f(b, c, lc)
				})
			}
		})
	}
}
