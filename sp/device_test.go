package sp

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
	"ulysses/testkit/mpitest"
)

// lateRun is a layer on a device whose memory the host cannot read and whose operations run late.
type lateRun struct {
	dev    device.Device
	done   func() error
	stream device.Stream
	bufs   []device.Buffer
	layerRun
	sent counted
}

// fakes returns test devices with different properties. They compute as the CPU does.
func fakes() []devicetest.Kind {
	return []devicetest.Kind{devicetest.Fake("tokens first", fake.Options{}),
		devicetest.Fake("heads first", fake.Options{HeadMajor: true})}
}

// plugins returns the CUDA plug-in with its communicators.
func plugins(t *testing.T) []devicetest.Kind {
	return []devicetest.Kind{devicetest.CUDA(t, "cuda", false), devicetest.CUDA(t, "cuda, through the host", true)}
}

func eachLate(t *testing.T, kinds []devicetest.Kind, dtypes []tensor.DType, most int,
	f func(c comm.Comm, lc layerCase, k devicetest.Kind) error) {
	for _, k := range kinds {
		for _, dtype := range dtypes {
			for _, lc := range layerCases {
				if most < 8 && !slices.Contains(pluginCases, lc.name) {
					continue
				}
				t.Run(fmt.Sprint(k.Name, "/", dtype, "/", lc.name), func(t *testing.T) {
					lc.layer.DType = dtype
					for _, n := range mpitest.Sizes() {
						if n <= most {
							mpitest.Ranks(t, n, func(c comm.Comm) error { return f(c, lc, k) })
						}
					}
				})
			}
		}
	}
}

// pluginCases are the cases for the emulated plug-in, which is slow: one for each kind of uneven
// ranks or documents.
var pluginCases = []string{"shared key heads", "groups across ranks", "fewer heads than ranks",
	"fewer tokens than ranks", "value heads wider",
	"documents in rows", "documents across", "window"}

var bothTypes = []tensor.DType{tensor.F32, tensor.BF16}

// late is prepare on a device of kind k.
func late(host comm.Comm, l Layer, s BatchSpec, k devicetest.Kind) *lateRun {
	d, c, done, err := k.Open(host)
	must(err)
	r := &lateRun{dev: d, done: done}
	r.sent.Comm = c
	r.stream, err = d.NewStream()
	must(err)
	r.p, err = NewPlan(d, &r.sent, l)
	must(err)
	r.x, err = NewBatch(&r.sent, s)
	must(err)
	x, n, size := r.x, s.Batch, r.p.Sizes(r.x)
	gapped := func(dtype tensor.DType, rows, heads, dim int64) tensor.Tensor {
		outer := tensor.Of(nil, dtype, n, rows+1, heads+1, dim+3)
		return r.bytes(outer.Bytes()).At(0, dtype, n, rows+1, heads+1, dim+3).Slice(1, 0, rows).Slice(2, 0,
			heads).Slice(3, 0, dim)
	}
	r.a = Args{Q: gapped(l.DType, x.Rows(), l.Heads, l.Dim), K: gapped(l.DType, x.KVRows(), l.KVHeads, l.Dim),
		V: gapped(l.DType, x.KVRows(), l.KVHeads, l.VDim), Out: gapped(l.DType, x.Rows(), l.Heads, l.VDim),
		LSE: gapped(tensor.F32, x.Rows(), l.Heads, 1).Select(3, 0), Saved: r.bytes(size.Saved),
		Workspace: r.bytes(size.Workspace)}
	r.g = Grads{DOut: gapped(l.DType, x.Rows(), l.Heads, l.VDim), DQ: gapped(l.DType, x.Rows(), l.Heads, l.Dim),
		DK: gapped(l.DType, x.KVRows(), l.KVHeads, l.Dim), DV: gapped(l.DType, x.KVRows(), l.KVHeads, l.VDim)}
	r.fill(r.a.Q, nameQ, x.Lo())
	r.fill(r.a.K, nameK, x.KVLo())
	r.fill(r.a.V, nameV, x.KVLo())
	r.fill(r.g.DOut, nameDOut, x.Lo())
	return r
}

// close closes the run on ranks without an error. Collective.
func (r *lateRun) close() error {
	must(r.stream.Sync())
	must(r.done())
	for _, b := range r.bufs {
		b.Free()
	}
	r.stream.Close()
	r.dev.Close()
	return nil
}

// bytes allocates memory that is filled with NaN.
func (r *lateRun) bytes(n int64) tensor.Tensor {
	b, err := r.dev.Alloc(max(n, 1))
	must(err)
	r.bufs = append(r.bufs, b)
	t := tensor.Of(b.Pointer(), tensor.U8, n)
	t.Where = r.dev.Info().Place
	must(r.dev.Fill(r.stream, t, 0xff))
	return t
}

func (r *lateRun) fill(t tensor.Tensor, name uint64, lo int64) {
	host := tensor.OfFloat32(make([]float32, t.Numel()), t.Dims()...)
	fill(host, name, lo, 0)
	must(r.dev.Copy(r.stream, t, host))
	must(r.stream.Sync())
}

// host copies a tensor to the host, as F32.
func (r *lateRun) host(t tensor.Tensor) tensor.Tensor {
	x := tensor.OfFloat32(make([]float32, t.Numel()), t.Dims()...)
	must(r.dev.Copy(r.stream, x, t))
	must(r.stream.Sync())
	return x
}

func (r *lateRun) run() error {
	if err := r.p.Forward(r.stream, r.x, &r.a); err != nil {
		return err
	}
	return r.p.Backward(r.stream, r.x, &r.a, &r.g)
}

// results returns out, lse, dq, dk and dv on the host.
func (r *lateRun) results() [5]tensor.Tensor {
	return [5]tensor.Tensor{r.host(r.a.Out), r.host(addUnitAxis(r.a.LSE)), r.host(r.g.DQ), r.host(r.g.DK),
		r.host(r.g.DV)}
}

var resultNames = [5]string{"out", "lse", "dq", "dk", "dv"}

// A test device with another layout gives results that are bitwise equal to the CPU's.
func TestLateDeviceGivesTheBitsOfTheCPU(t *testing.T) {
	eachLate(t, fakes(), bothTypes[:1], 8, func(c comm.Comm, lc layerCase, k devicetest.Kind) error {
		r := late(c, lc.layer, lc.batch, k)
		must(r.run())
		got := r.results()
		b := newBench()
		defer b.close()
		w := prepare(b, c, lc.layer, lc.batch, 0, 0)
		must(w.forwardBackward(b))
		for i, want := range []tensor.Tensor{w.a.Out, addUnitAxis(w.a.LSE), w.g.DQ, w.g.DK, w.g.DV} {
			if err := sameBits(resultNames[i], got[i], want, 0); err != nil {
				return err
			}
		}
		return r.close()
	})
}

// On any number of ranks, out, lse and dq are bitwise equal to one rank's, in both types. So are dk
// and dv of key heads on one rank; dk and dv of other key heads are close. BF16 sends half the
// bytes, except for the LSE.
func TestLateRanksGiveTheBitsOfOne(t *testing.T) {
	eachLate(t, fakes(), bothTypes, 8, bitsOfOne)
	eachLate(t, []devicetest.Kind{devicetest.CPU()}, bothTypes[1:], 8, bitsOfOne)
	eachLate(t, plugins(t)[:1], bothTypes, 4, bitsOfOne)
	eachLate(t, plugins(t)[1:], bothTypes[1:], 3, bitsOfOne)
}

func bitsOfOne(c comm.Comm, lc layerCase, k devicetest.Kind) error {
	r := late(c, lc.layer, lc.batch, k)
	forward, backward := r.p.BytesSent(r.x)
	if must(r.run()); r.sent.bytes != forward+backward+r.p.LSEBytesSent(r.x) {
		return fmt.Errorf("sent %d bytes, planned %d, %d and %d", r.sent.bytes, forward, backward,
			r.p.LSEBytesSent(r.x))
	}
	one := late(alone(), lc.layer, lc.batch, k)
	must(one.run())
	got, want := r.results(), one.results()
	for i, lo := range [5]int64{r.x.Lo(), r.x.Lo(), r.x.Lo(), r.x.KVLo(), r.x.KVLo()} {
		for h := range got[i].Shape[2] {
			x, y := got[i].Slice(2, h, h+1), want[i].Slice(2, h, h+1)
			holders := 0
			for _, k := range r.p.key {
				if h >= k.lo && h < k.hi {
					holders++
				}
			}
			if i < 3 || holders < 2 {
				if err := sameBits(resultNames[i], x, y, lo); err != nil {
					return err
				}
				continue
			}
			limit := 1e-6 // partial sums, each rounded to the type, and their sums
			if lc.layer.DType == tensor.BF16 {
				limit = float64(2*holders) / 512
			}
			if delta, top := farFrom(x, y, lo); !(delta <= limit*top) {
				return fmt.Errorf("%s of key head %d, on %d ranks, is %.3g from one rank's, of %.3g", resultNames[i], h,
					holders, delta, top)
			}
		}
	}
	must(one.close())
	return r.close()
}

// farFrom returns max|Δ| between the rows of a rank, from lo on, and the rows of a whole tensor,
// and the largest element of the latter.
func farFrom(got, whole tensor.Tensor, lo int64) (delta, top float64) {
	each(got, func(n, i, h, d int64, x *float32) {
		if e := math.Abs(float64(*x) - float64(*at(whole, n, lo+i, h, d))); !(e <= delta) {
			delta = e
		}
	})
	each(whole, func(_, _, _, _ int64, x *float32) { top = max(top, math.Abs(float64(*x))) })
	return delta, top
}

// The error of BF16 against float64 is within the bound of its roundings: of the results and, in
// the backward pass, of the saved output. In F32 the plug-in has the limit of F32.
func TestLateDevicesAgainstFloat64(t *testing.T) {
	eachLate(t, []devicetest.Kind{fakes()[0], devicetest.CPU()}, bothTypes[1:], 8, againstFloat64)
	eachLate(t, plugins(t)[:1], bothTypes, 3, againstFloat64)
}

// A ring on the plug-in has the error of one rank against float64: groups of one rank and of two,
// with causal masks, windows and documents, whose keys arrive in rounds.
func TestRingOnThePlugin(t *testing.T) {
	for _, x := range []struct {
		ranks int
		ring  int64
	}{{2, 2}, {3, 3}, {4, 2}} {
		if !slices.Contains(mpitest.Sizes(), x.ranks) {
			continue
		}
		for _, lc := range layerCases {
			if !slices.Contains([]string{"shared key heads", "documents in rows", "window both ways"}, lc.name) {
				continue
			}
			lc.layer.Ring, lc.batch.Ring = x.ring, x.ring
			for _, dtype := range bothTypes {
				lc.layer.DType = dtype
				t.Run(fmt.Sprintf("%v/%s/%d ranks, ring of %d", dtype, lc.name, x.ranks, x.ring), func(t *testing.T) {
					kind := devicetest.CUDA(t, "cuda", false)
					mpitest.Ranks(t, x.ranks, func(c comm.Comm) error { return againstFloat64(c, lc, kind) })
				})
			}
		}
	}
}

// The same on the CPU and on a device whose work runs late, with more cases.
func TestRingOnLateDevices(t *testing.T) {
	for _, kind := range []devicetest.Kind{devicetest.CPU(), fakes()[0]} {
		for _, x := range [][2]int{{2, 2}, {3, 3}, {4, 2}, {4, 4}, {8, 4}} {
			if !slices.Contains(mpitest.Sizes(), x[0]) {
				continue
			}
			for i, lc := range layerCases {
				lc.layer.Ring, lc.batch.Ring, lc.layer.Gather = int64(x[1]), int64(x[1]), i%2 == 0
				for _, dtype := range bothTypes {
					lc.layer.DType = dtype
					t.Run(fmt.Sprintf("%s/%v/%s/%d ranks, ring of %d", kind.Name, dtype, lc.name, x[0], x[1]),
						func(t *testing.T) {
							mpitest.Ranks(t, x[0], func(c comm.Comm) error { return againstFloat64(c, lc, kind) })
						})
				}
			}
		}
	}
}

func againstFloat64(c comm.Comm, lc layerCase, k devicetest.Kind) error {
	r := late(c, lc.layer, lc.batch, k)
	must(r.run())
	round, limits := func(v float32) float32 { return v }, [5]float64{2e-5, 2e-5, 2e-5, 2e-5, 2e-5}
	if lc.layer.DType == tensor.BF16 {
		// Half a unit in the last place is at most 2^-8 of a number.
		round, limits = func(v float32) float32 { return tensor.BF16ToF32(tensor.F32ToBF16(v)) },
			[5]float64{1.0 / 250, 2e-5, 1.0 / 60, 1.0 / 60, 1.0 / 60}
	}
	cuQ, cuK := r.x.Documents()
	g := r.p.layer.reference(cuQ, cuK)
	exact := referenceOf[float64](g, r.x, round)
	plain := exact
	if lc.layer.DType == tensor.BF16 { // as a plain implementation in BF16 computes it
		g.Keep = func(x float64) float64 { return float64(round(float32(x))) }
		plain = referenceOf[float64](g, r.x, round)
	}
	for i, x := range r.results() {
		lo, seq := r.x.Lo(), r.x.Seq()
		if i >= 3 {
			lo, seq = r.x.KVLo(), r.x.KVSeq()
		}
		delta, top, allowed := 0.0, 0.0, 0.0
		for j, e := range exact[i] {
			if !math.IsInf(e, 0) {
				top, allowed = max(top, math.Abs(e)), max(allowed, 2*math.Abs(float64(round(float32(plain[i][j])))-e))
			}
		}
		each(x, func(n, row, h, d int64, v *float32) {
			e := exact[i][((n*seq+lo+row)*x.Shape[2]+h)*x.Shape[3]+d]
			if off := math.Abs(float64(*v) - e); !(off <= delta) && !(math.IsInf(e, -1) && float64(*v) == e) {
				delta = off
			}
		})
		// gradients that are zero up to rounding are compared with inputs below 1
		limit := limits[i] * max(top, 0.25)
		if lc.layer.Ring > 1 && i != 1 { // a ring rounds weights of the softmax relative to other maxima
			limit = max(limit, allowed)
		}
		if !(delta <= limit) {
			return fmt.Errorf("%s: error %.3g of %.3g, limit %.3g", resultNames[i], delta, top, limit)
		}
	}
	return r.close()
}

// NewPlan refuses a type in which the device does not compute.
func TestTypesAreRefused(t *testing.T) {
	b := newBench()
	defer b.close()
	l := Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, DType: tensor.F16}
	_, err := NewPlan(b.dev, alone(), l)
	if err == nil || err.Error() != "sp.NewPlan: dtype F16 is not supported by device cpu; use one of [F32 BF16]" {
		t.Errorf("F16: %v", err)
	}
	l.DType = tensor.F32
	r := prepare(b, alone(), l, BatchSpec{Batch: 1, Seq: 8}, 0, 0)
	r.a.K.DType = tensor.BF16
	if err := r.forwardBackward(b); err == nil {
		t.Error("keys of another type")
	}
}

// NewPlan refuses heads that are wider than the device's kernels support, also on ranks without
// heads.
func TestWideHeadsAreRefused(t *testing.T) {
	kind := devicetest.CUDA(t, "cuda", false)
	refused := func(host comm.Comm) error {
		d, c, done, err := kind.Open(host)
		must(err)
		defer d.Close()
		widest := d.Info().AttentionHead
		for _, x := range []struct {
			dim, vdim int64
			fine      bool
		}{{widest, widest, true}, {widest + 1, 64, false}, {64, widest + 1, false}} {
			_, err := NewPlan(d, c, Layer{Heads: 1, KVHeads: 1, Dim: x.dim, VDim: x.vdim})
			if (err == nil) != x.fine || !x.fine &&
				(status.Of(err) != status.Unsupported ||
					!strings.Contains(err.Error(),
						fmt.Sprintf("dim %d, v_dim %d: attention of device cuda", x.dim, x.vdim))) {
				return fmt.Errorf("heads of %d and %d: %v", x.dim, x.vdim, err)
			}
		}
		return done()
	}
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, refused)
	}
}

// In BF16 the LSE, which is F32, has its own all-to-all, which may be the largest.
func TestWireHoldsTheLSE(t *testing.T) {
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			d, err := fake.Open(fake.Options{})
			must(err)
			defer d.Close()
			p, err := NewPlan(d, c, Layer{Heads: 16, KVHeads: 1, Dim: 1, VDim: 1, DType: tensor.BF16})
			must(err)
			x, err := NewBatch(c, BatchSpec{Batch: 1, Seq: 64})
			must(err)
			lse := tensor.Of(nil, tensor.F32, 1, x.Rows(), 16, 1)
			send, recv := p.wireElements([]reshardTensor{{seq: lse, split: p.query, rows: x.queries.inOrder.exchange}})
			if need, have := 4*(send+recv), p.wireBytes(x, false); have < need {
				return fmt.Errorf("%d bytes for %d", have, need)
			}
			return nil
		})
	}
}
