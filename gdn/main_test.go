package gdn

import (
	"fmt"
	"math"
	"os"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/mpitest"
)

func TestMain(m *testing.M) { os.Exit(mpitest.Main(m)) }

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// bench is the device and the memory of a rank in a test. Failures panic, and comm.RunLocal returns
// them as the test's error.
type bench struct {
	dev    device.Device
	comm   comm.Comm // for its tensors
	ledger *comm.Ledger
	stream device.Stream
	done   func() error
	bufs   []device.Buffer
	gaps   []gap
}

// gap is a tensor inside a larger one. Elements of outer that are not in inner must not change.
type gap struct{ outer, inner tensor.Tensor }

func open(k devicetest.Kind, host comm.Comm) *bench {
	d, c, done, err := k.Open(host)
	must(err)
	s, err := d.NewStream()
	must(err)
	ledger := comm.NewLedger()
	return &bench{dev: d, comm: comm.NewCounted(c, "sequence", ledger, nil, nil), ledger: ledger, stream: s, done: done}
}

// sent returns the bytes that this rank has sent to others.
func (b *bench) sent() (n int64) {
	for _, e := range b.ledger.Entries() {
		n += e.Bytes
	}
	return n
}

// close frees the rank's memory and device. It is called only without errors, because closing may
// be collective.
func (b *bench) close() {
	must(b.stream.Sync())
	must(b.done())
	for _, x := range b.bufs {
		x.Free()
	}
	b.stream.Close()
	b.dev.Close()
}

// bytes allocates memory filled with NaN.
func (b *bench) bytes(n int64) tensor.Tensor {
	buf, err := b.dev.Alloc(max(n, 1))
	must(err)
	b.bufs = append(b.bufs, buf)
	t := tensor.Of(buf.Pointer(), tensor.U8, n)
	t.Where = b.dev.Info().Place
	if n > 0 {
		must(b.dev.Fill(b.stream, t, 0xff))
	}
	return t
}

// dense allocates a dense tensor.
func (b *bench) dense(dtype tensor.DType, shape ...int64) tensor.Tensor {
	return b.bytes(tensor.Of(nil, dtype, shape...).Bytes()).At(0, dtype, shape...)
}

// gapped allocates a tensor [B, n, H, D] inside a larger one, so that no two axes can be merged.
func (b *bench) gapped(dtype tensor.DType, n0, n1, n2, n3 int64) tensor.Tensor {
	outer := b.dense(dtype, n0, n1+1, n2+1, n3+3)
	inner := outer.Slice(1, 0, n1).Slice(2, 0, n2).Slice(3, 0, n3)
	b.gaps = append(b.gaps, gap{outer, inner})
	return inner
}

// gapsIntact panics if elements outside gapped tensors have changed.
func (b *bench) gapsIntact() error {
	for _, g := range b.gaps {
		x, in := b.host(g.outer), g.inner.Shape
		each(x, func(i [4]int64, v *float32) {
			if i[1] >= in[1] || i[2] >= in[2] || i[3] >= in[3] {
				if *v == *v {
					panic(fmt.Sprintf("%v: the element %v outside it was overwritten", g.inner, i))
				}
			}
		})
	}
	return nil
}

// host copies a tensor to the host, in F32, with four axes.
func (b *bench) host(t tensor.Tensor) tensor.Tensor {
	x := tensor.OfFloat32(make([]float32, t.Numel()), t.Dims()...)
	if t.Where != b.dev.Info().Place {
		x = t // there already
	} else if t.Numel() > 0 {
		must(b.dev.Copy(b.stream, x, t))
		must(b.stream.Sync())
	}
	for x.NDim < 4 {
		x = x.View(append(x.Dims(), 1)...)
	}
	return x
}

// put writes a function of the global index to a tensor, whose axis 1 begins at token lo.
func (b *bench) put(t tensor.Tensor, lo int64, f func(i [4]int64) float32) {
	x := tensor.OfFloat32(make([]float32, t.Numel()), t.Dims()...)
	y := x
	for y.NDim < 4 {
		y = y.View(append(y.Dims(), 1)...)
	}
	each(y, func(i [4]int64, v *float32) { i[1] += lo; *v = f(i) })
	if t.Numel() > 0 {
		must(b.dev.Copy(b.stream, t, x))
		must(b.stream.Sync())
	}
}

// each visits the elements of a host tensor with four axes.
func each(t tensor.Tensor, f func(i [4]int64, v *float32)) {
	data := t.Float32s()
	at := 0
	for a := range t.Shape[0] {
		for b := range t.Shape[1] {
			for c := range t.Shape[2] {
				for d := range t.Shape[3] {
					f([4]int64{a, b, c, d}, &data[at])
					at++
				}
			}
		}
	}
}

// value returns an element of a global tensor, in [-1, 1). Each rank can compute every element.
func value(name uint64, i [4]int64) float32 {
	h := name*0x9e3779b97f4a7c15 + 0x1234567
	for _, x := range i {
		h ^= uint64(x) + 0x632be59bd9b4e019
		h *= 0xff51afd7ed558ccd
		h ^= h >> 29
	}
	return float32(int64(h>>40)-1<<23) / (1 << 23)
}

// The names of global tensors.
const (
	nameQ = iota
	nameK
	nameV
	nameG
	nameBeta
	nameDOut
	nameStateIn
	nameDStateOut
	nameQKV
	nameA
	nameB
	nameConv
	nameALog
	nameDtBias
	nameZ
	nameNorm
)

// testCase is a test case: a layer and a batch.
type testCase struct {
	name  string
	layer Layer
	batch sp.BatchSpec
	decay float32 // g is from −2·decay to 0; 0 = 0.1
}

// input returns the elements of a global tensor in a case, before rounding to the layer's type.
func (k *testCase) input(name uint64) func(i [4]int64) float32 {
	return func(i [4]int64) float32 {
		v := value(name, i)
		switch name {
		case nameG:
			decay := k.decay
			if decay == 0 {
				decay = 0.1
			}
			return decay * (v - 1)
		case nameBeta:
			return (v + 1) / 2
		case nameK:
			if !k.layer.L2Norm { // else states would grow
				return v / 4
			}
		case nameConv:
			return v / 2
		case nameNorm:
			return 1 + v/2
		}
		return v
	}
}

var small = Layer{KeyHeads: 2, ValueHeads: 4, KeyDim: 8, ValueDim: 12, L2Norm: true, ConvWidth: 4}

func with(change func(l *Layer)) Layer {
	l := small
	change(&l)
	return l
}

func packed(cu ...int64) sp.BatchSpec {
	lengths := []int64{0}
	for _, n := range cu {
		lengths = append(lengths, lengths[len(lengths)-1]+n)
	}
	return sp.BatchSpec{Batch: 1, Seq: lengths[len(lengths)-1], CuSeqlens: lengths}
}

var cases = []testCase{
	{"one document", with(func(l *Layer) { l.GatedNorm = true }), sp.BatchSpec{Batch: 1, Seq: 203}, 0},
	{"strong decay", small, sp.BatchSpec{Batch: 1, Seq: 203}, 10},
	{"512 1 511", with(func(l *Layer) { l.KeyHeads, l.ValueHeads, l.KeyDim, l.ValueDim = 1, 2, 8, 8 }),
		packed(512, 1, 511), 0},
	{"513 511", with(func(l *Layer) { l.KeyHeads, l.ValueHeads, l.KeyDim, l.ValueDim = 1, 1, 8, 8 }),
		packed(513, 511), 0},
	{"257 255 257 255", with(func(l *Layer) {
		l.KeyHeads, l.ValueHeads, l.KeyDim, l.ValueDim, l.ConvWidth = 2, 2, 4, 8, 5
	}), packed(257, 255, 257, 255), 0},
	{"257 1 253 257 1 253 2",
		with(func(l *Layer) { l.KeyHeads, l.ValueHeads, l.KeyDim, l.ValueDim, l.ConvWidth = 1, 2, 8, 4, 2 }),
		packed(257, 1, 253, 257, 1, 253, 2), 0},
	{"documents of one token", with(func(l *Layer) { l.ConvWidth = 1 }), packed(1, 1, 1, 20, 1, 1, 9, 1, 1), 0},
	{"keys across ranks", with(func(l *Layer) {
		l.KeyHeads, l.ValueHeads, l.KeyDim, l.ValueDim, l.ConvWidth, l.GatedNorm = 3, 9, 5, 7, 5, true
	}),
		sp.BatchSpec{Batch: 2, Seq: 57, CuSeqlens: []int64{0, 50, 57, 60, 114}}, 0},
	{"one key head", with(func(l *Layer) { l.KeyHeads, l.ValueHeads, l.Scale = 1, 8, 0.4 }), packed(40, 37), 0},
	{"fewer heads than ranks", with(func(l *Layer) { l.KeyHeads, l.ValueHeads = 1, 2 }), packed(70, 3), 0},
	{"norm on ranks without tokens", with(func(l *Layer) { l.GatedNorm = true }),
		sp.BatchSpec{Batch: 2, Seq: 3, CuSeqlens: []int64{0, 3, 4, 6}}, 0},
	{"fewer tokens than ranks", small, sp.BatchSpec{Batch: 2, Seq: 3, CuSeqlens: []int64{0, 3, 4, 6}}, 0},
	{"one token", small, sp.BatchSpec{Batch: 1, Seq: 1}, 0},
	{"documents in rows", with(func(l *Layer) { l.GatedNorm = true }),
		sp.BatchSpec{Batch: 3, Seq: 70, CuSeqlens: []int64{0, 70, 75, 140, 141, 209, 210}}, 0},
	{"short rows", with(func(l *Layer) { l.ConvWidth, l.GatedNorm = 3, true }),
		sp.BatchSpec{Batch: 2, Seq: 20, CuSeqlens: []int64{0, 13, 20, 21, 40}}, 0},
	{"without the norm", with(func(l *Layer) { l.L2Norm, l.Chunk = false, 16 }), packed(100, 33), 0},
}

// rowsOf returns uneven shards of a sequence for any number of ranks: some ranks have no tokens,
// others few.
func rowsOf(seq int64, ranks int) []int64 {
	rows := make([]int64, ranks)
	left := seq
	for r := range rows {
		switch {
		case r == ranks-1:
			rows[r] = left
		case r%3 == 1:
			rows[r] = 0
		case r%3 == 0:
			rows[r] = min(left, 2)
		default:
			rows[r] = left / 2
		}
		left -= rows[r]
	}
	return rows
}

var host = devicetest.CPU()

// round rounds a value to a type.
func round(dtype tensor.DType, v float32) float32 {
	if dtype == tensor.BF16 {
		return tensor.BF16ToF32(tensor.F32ToBF16(v))
	}
	return v
}

// alone returns a communicator of one rank.
func alone() comm.Comm { return comm.Local(1)[0] }

// strategies are the strategies, State with each of its two algorithms.
var strategies = []struct {
	name     string
	strategy Strategy
	scan     bool
}{{"heads", Heads, false}, {"state", State, false}, {"scan", State, true}}

// far returns max|Δ| between a rank's tokens, from lo on, and a whole tensor, and the largest
// element of the whole tensor. With NaN, max|Δ| is +Inf.
func far(got tensor.Tensor, whole []float64, rows, lo int64) (delta, top float64) {
	h, d := got.Shape[2], got.Shape[3]
	each(got, func(i [4]int64, v *float32) {
		e := math.Abs(float64(*v) - whole[((i[0]*rows+lo+i[1])*h+i[2])*d+i[3]])
		if math.IsNaN(e) {
			e = math.Inf(1)
		}
		delta = max(delta, e)
	})
	for _, v := range whole {
		top = max(top, math.Abs(v))
	}
	return delta, top
}

// plan returns the plan and the batch of a case.
func (b *bench) plan(k *testCase, scan bool) (*Plan, *sp.Batch) {
	p, err := NewPlan(b.dev, b.comm, k.layer)
	must(err)
	setScan(p, scan)
	x, err := sp.NewBatch(b.comm, k.batch)
	must(err)
	return p, x
}

// setScan chooses the algorithm by which a plan with State sends states.
func setScan(p *Plan, scan bool) {
	if m, ok := p.method.(*stateMethod); ok {
		m.chain.scan = scan
	}
}

// sharedKeys reports whether the value heads of a key head are on several ranks of a plan by heads.
func sharedKeys(p *Plan) bool {
	m, ok := p.method.(*headsMethod)
	return ok && m.sharedKeys
}
