package cpu

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

type zz struct {
	t    testing.TB
	d    *Device
	typ  tensor.DType
	rnd  *rand.Rand
	outs []tensor.Tensor
	pad  int64
}

// arr makes an array with a padded last stride, random values.
func (z *zz) arr(d tensor.DType, shape ...int64) tensor.Tensor {
	n := int64(1)
	for i, m := range shape {
		if i == len(shape)-1 && i > 0 {
			m += z.pad
		}
		n *= m
	}
	b, err := z.d.Alloc(n*d.Size() + 64)
	if err != nil {
		z.t.Fatal(err)
	}
	z.t.Cleanup(b.Free)
	t := tensor.Of(b.Pointer(), d, shape...)
	t.Where = tensor.Host
	if z.pad > 0 {
		s := int64(1)
		for i := len(shape) - 1; i >= 0; i-- {
			t.Stride[i] = s
			m := shape[i]
			if i == len(shape)-1 && i > 0 {
				m += z.pad
			}
			s *= m
		}
	}
	for i := int64(0); i < n; i++ {
		v := float32(z.rnd.Float64()*2 - 1)
		if d == tensor.BF16 {
			*(*uint16)(unsafe.Add(b.Pointer(), i*2)) = tensor.F32ToBF16(v)
		} else {
			*(*float32)(unsafe.Add(b.Pointer(), i*4)) = v
		}
	}
	return t
}
func (z *zz) a(shape ...int64) tensor.Tensor { return z.arr(z.typ, shape...) }
func (z *zz) v(shape ...int64) tensor.Tensor {
	p := z.pad
	z.pad = 0
	t := z.arr(z.typ, shape...)
	z.pad = p
	return t
}
func (z *zz) f(shape ...int64) tensor.Tensor {
	p := z.pad
	z.pad = 0
	t := z.arr(tensor.F32, shape...)
	z.pad = p
	return t
}
func (z *zz) ids(n, lim int64) tensor.Tensor {
	x := make([]int32, n)
	for i := range x {
		x[i] = int32(z.rnd.Int63n(lim))
	}
	t := tensor.Of(unsafe.Pointer(&x[0]), tensor.I32, n)
	t.Where = tensor.Host
	z.t.Cleanup(func() { runtime.KeepAlive(x) })
	return t
}

type zzop struct {
	name string
	run  func() error
	outs []tensor.Tensor
}

func (z *zz) ops(T, N int64) []zzop {
	d := z.d
	var o []zzop
	add := func(name string, run func() error, outs ...tensor.Tensor) { o = append(o, zzop{name, run, outs}) }
	x, y, g, u, w, w2 := z.a(T, N), z.a(T, N), z.a(T, N), z.a(T, N), z.a(T, N), z.a(T, N)
	{
		dst := z.a(T, N)
		add("Add", func() error { return d.Add(nil, dst, x, y) }, dst)
	}
	{
		dst := z.f(N)
		add("ColumnSum", func() error { return d.ColumnSum(nil, dst, x) }, dst)
	}
	{
		dst := z.v(T * N)
		add("Scale", func() error { return d.Scale(nil, dst, 1.0001) }, dst)
	}
	wt, rstd, dw := z.v(N), z.f(T), z.f(N)
	{
		yy := z.a(T, N)
		add("RMSNorm", func() error {
			return d.RMSNormForward(nil, &device.RMSNorm{X: x, W: wt, Y: yy, RStd: rstd, Eps: 1e-5, Centre: 1})
		}, yy, rstd)
		dx := z.a(T, N)
		add("RMSNormBack", func() error {
			return d.RMSNormBackward(nil, &device.RMSNormGrad{X: x, W: wt, RStd: rstd, DY: y, DX: dx, DW: dw, Centre: 1})
		}, dx, dw)
		add("RMSNormBackAdd", func() error {
			return d.RMSNormBackward(nil, &device.RMSNormGrad{X: x, W: wt, RStd: rstd, DY: y, DX: dx, DW: dw, AddDX: true})
		}, dx, dw)
	}
	{
		D := int64(128)
		if N%128 != 0 {
			D = 50
		}
		H := N / D
		x3, y3 := z.a(T, H, D), z.a(T, H, D)
		cos, sin := z.f(T, D/2), z.f(T, D/2)
		add("Rope", func() error { return d.Rope(nil, &device.Rope{X: x3, Y: y3, Cos: cos, Sin: sin}) }, y3)
		cos2, sin2 := z.f(T, 18), z.f(T, 18)
		add("RopePart", func() error { return d.Rope(nil, &device.Rope{X: x3, Y: y3, Cos: cos2, Sin: sin2, Inverse: true}) }, y3)
		yy := z.a(T, H, D)
		wd, rs, dwd := z.v(D), z.f(T*H), z.f(D)
		add("GatedNormHeads", func() error {
			return d.GatedRMSNormForward(nil, &device.GatedRMSNorm{X: x3, Gate: y3, W: wd, Y: yy, RStd: rs, Eps: 1e-5})
		}, yy, rs)
		dx, dg := z.a(T, H, D), z.a(T, H, D)
		add("GatedNormHeadsBack", func() error {
			return d.GatedRMSNormBackward(nil, &device.GatedRMSNormGrad{X: x3, Gate: y3, W: wd, DY: yy, RStd: rs, DX: dx, DGate: dg, DW: dwd})
		}, dx, dg, dwd)
		add("RMSNormHeads", func() error {
			return d.RMSNormForward(nil, &device.RMSNorm{X: x3, W: wd, Y: yy, RStd: rs, Eps: 1e-5, Centre: 1})
		}, yy, rs)
		add("RMSNormHeadsBack", func() error {
			return d.RMSNormBackward(nil, &device.RMSNormGrad{X: x3, W: wd, RStd: rs, DY: y3, DX: dx, DW: dwd, Centre: 1})
		}, dx, dwd)
	}
	add("SwiGLU", func() error { return d.SwiGLUForward(nil, &device.SwiGLU{Gate: x, Up: y, Y: g}) }, g)
	add("SwiGLUBack", func() error {
		return d.SwiGLUBackward(nil, &device.SwiGLUGrad{Gate: x, Up: y, DY: u, DGate: w, DUp: w2})
	}, w, w2)
	add("SigmoidGate", func() error { return d.SigmoidGateForward(nil, &device.SigmoidGate{X: x, Gate: y, Y: g}) }, g)
	add("SigmoidGateBack", func() error {
		return d.SigmoidGateBackward(nil, &device.SigmoidGateGrad{X: x, Gate: y, DY: u, DX: w, DGate: w2})
	}, w, w2)
	add("GatedNorm", func() error {
		return d.GatedRMSNormForward(nil, &device.GatedRMSNorm{X: x, Gate: y, W: wt, Y: g, RStd: rstd, Eps: 1e-5})
	}, g, rstd)
	add("GatedNormBack", func() error {
		return d.GatedRMSNormBackward(nil, &device.GatedRMSNormGrad{X: x, Gate: y, W: wt, DY: u, RStd: rstd, DX: w, DGate: w2, DW: dw})
	}, w, w2, dw)
	for _, width := range []int64{4, 2} {
		cw, dcw, bef, dbef := z.v(N, width), z.f(N, width), z.a(width-1, N), z.a(width-1, N)
		cu := []int64{0, T / 3, T}
		c := device.Conv1d{X: x, Y: g, W: cw, Before: bef, Cu: cu}
		add(fmt.Sprint("Conv1d ", width), func() error { return d.Conv1dForward(nil, &c) }, g)
		cg := device.Conv1dGrad{Conv1d: c, DY: u, DX: w, DW: dcw, DBefore: dbef}
		add(fmt.Sprint("Conv1dBack ", width), func() error { return d.Conv1dBackward(nil, &cg) }, w, dcw, dbef)
	}
	for _, H := range []int64{32, N} {
		aa, bb, G, B, al, bi := z.a(T, H), z.a(T, H), z.f(T, H), z.f(T, H), z.v(H), z.v(H)
		add(fmt.Sprint("DeltaGates ", H), func() error {
			return d.DeltaGatesForward(nil, &device.DeltaGates{A: aa, B: bb, ALog: al, DtBias: bi, G: G, Beta: B})
		}, G, B)
		da, db, dal, dbi := z.a(T, H), z.a(T, H), z.f(H), z.f(H)
		add(fmt.Sprint("DeltaGatesBack ", H), func() error {
			return d.DeltaGatesBackward(nil, &device.DeltaGatesGrad{A: aa, B: bb, ALog: al, DtBias: bi, DG: G, DBeta: B, DA: da, DB: db, DALog: dal, DDtBias: dbi})
		}, da, db, dal, dbi)
	}
	{
		V := int64(4000)
		table, dt, ids := z.a(V, N), z.f(V, N), z.ids(T, V)
		add("Embedding", func() error { return d.EmbeddingForward(nil, &device.Embedding{Table: table, IDs: ids, Y: g}) }, g)
		add("EmbeddingBack", func() error { return d.EmbeddingBackward(nil, &device.EmbeddingGrad{IDs: ids, DY: u, DTable: dt}) }, dt)
	}
	{
		lo, ta, nll := z.f(T, N), z.ids(T, N), z.f(T)
		add("CrossEntropy", func() error {
			return d.CrossEntropy(nil, &device.CrossEntropy{Logits: lo, Targets: ta, NLL: nll, DLogits: g, GradScale: 0.3})
		}, nll, g)
	}
	{
		c := z.f(T, N)
		add("Copy", func() error { return d.Copy(nil, g, x) }, g)
		add("Cast to F32", func() error { return d.Copy(nil, c, x) }, c)
		add("Cast from F32", func() error { return d.Copy(nil, g, c) }, g)
		l := z.a(T, N)
		l2 := tensor.Of(l.Data, tensor.BF16, T, N)
		l2.Where = tensor.Host
		add("Cast to BF16", func() error { return d.Copy(nil, l2, c) }, l2)
		add("Cast of BF16", func() error { return d.Copy(nil, c, l2) }, c)
		tr := z.a(N, T)
		tr.Shape[0], tr.Shape[1], tr.Stride[0], tr.Stride[1] = T, N, tr.Stride[1], tr.Stride[0]
		add("Turn", func() error { return d.Copy(nil, g, tr) }, g)
	}
	{
		p, gr, m, v := z.f(T*N), z.f(T*N), z.f(T*N), z.f(T*N)
		low := tensor.Of(z.f(T*N).Data, tensor.BF16, T*N)
		low.Where = tensor.Host
		for i := range m.Numel() {
			q := (*float32)(unsafe.Add(v.Data, i*4))
			*q = float32(math.Abs(float64(*q)))
		}
		add("AdamW", func() error {
			return d.AdamW(nil, &device.AdamW{W: p, G: gr, M: m, V: v, Low: low, LR: 1e-3, Beta1: .9, Beta2: .95, Eps: 1e-8, WeightDecay: .1, GradScale: 1, Step: 3})
		}, p, m, v, low)
		add("SGD", func() error { return d.SGD(nil, &device.SGD{W: p, G: gr, Low: low, LR: 1e-3, WeightDecay: .1, GradScale: 1}) }, p, low)
	}
	return o
}

func hashOf(ts []tensor.Tensor) uint64 {
	h := fnv.New64a()
	for _, t := range ts {
		rows, n := int64(1), t.Dim(-1)
		_ = rows
		switch t.NDim {
		case 1:
			h.Write(unsafe.Slice((*byte)(t.Data), n*t.DType.Size()))
		case 2:
			for i := range t.Shape[0] {
				h.Write(unsafe.Slice((*byte)(unsafe.Add(t.Data, i*t.Stride[0]*t.DType.Size())), n*t.DType.Size()))
			}
		case 3:
			for i := range t.Shape[0] {
				for j := range t.Shape[1] {
					h.Write(unsafe.Slice((*byte)(unsafe.Add(t.Data, (i*t.Stride[0]+j*t.Stride[1])*t.DType.Size())), n*t.DType.Size()))
				}
			}
		}
	}
	return h.Sum64()
}

func TestZZHash(t *testing.T) {
	for _, isa := range ISAs() {
		for _, s := range [][3]int64{{333, 257, 3}, {2100, 128, 0}, {70, 3001, 1}} {
			d, err := New(Options{Workers: 2, ISA: isa})
			if err != nil {
				t.Fatal(err)
			}
			z := &zz{t: t, d: d.(*Device), typ: tensor.F32, rnd: rand.New(rand.NewSource(5)), pad: s[2]}
			for _, o := range z.ops(s[0], s[1]) {
				if err := o.run(); err != nil {
					t.Error(o.name, err)
				}
				fmt.Printf("HASH %s %v %s %x\n", isa, s, o.name, hashOf(o.outs))
			}
		}
	}
}

func TestZZTime(t *testing.T) {
	T, N := int64(8192), int64(1024)
	if e := os.Getenv("ZZN"); e != "" {
		N, _ = strconv.ParseInt(e, 10, 64)
	}
	only := os.Getenv("ZZOP")
	reps := 9
	if e := os.Getenv("ZZREPS"); e != "" {
		reps, _ = strconv.Atoi(e)
	}
	isas := ISAs()
	if e := os.Getenv("ZZISA"); e != "" {
		isas = strings.Split(e, ",")
	}
	for _, isa := range isas {
		d, err := New(Options{Workers: 2, ISA: isa})
		if err != nil {
			t.Fatal(err)
		}
		var ops [2][]zzop
		for i, typ := range []tensor.DType{tensor.F32, tensor.BF16} {
			z := &zz{t: t, d: d.(*Device), typ: typ, rnd: rand.New(rand.NewSource(5))}
			ops[i] = z.ops(T, N)
		}
		for j := range ops[0] {
			if !strings.Contains(ops[0][j].name, only) {
				continue
			}
			best := [2]time.Duration{1e15, 1e15}
			for range reps {
				for i := range 2 {
					t0 := time.Now()
					if ops[i][j].run() != nil {
						best[i] = 0
						continue
					}
					best[i] = min(best[i], time.Since(t0))
				}
			}
			fmt.Printf("TIME %-12s %-20s F32 %7.2f ms  BF16 %7.2f ms  x%.2f\n", isa, ops[0][j].name, best[0].Seconds()*1e3, best[1].Seconds()*1e3,
				best[0].Seconds()/best[1].Seconds())
		}
	}
}
