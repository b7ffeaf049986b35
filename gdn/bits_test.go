package gdn

import (
	"fmt"
	"math"
	"testing"

	"ulysses/comm"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
	"ulysses/testkit/mpitest"
)

// sameBits compares this rank's tokens of a tensor, from lo on, with the whole tensor, bitwise.
func sameBits(name string, got, whole tensor.Tensor, lo int64) (err error) {
	data, rows, h, d := whole.Float32s(), whole.Shape[1], whole.Shape[2], whole.Shape[3]
	each(got, func(i [4]int64, v *float32) {
		want := data[((i[0]*rows+lo+i[1])*h+i[2])*d+i[3]]
		if math.Float32bits(*v) != math.Float32bits(want) && err == nil {
			err = fmt.Errorf("%s%v is %v, want %v", name, i, *v, want)
		}
	})
	return err
}

// With Heads, every result on any number of ranks is bitwise equal to the result of one rank, also
// for key heads that several ranks share.
func TestHeadsBitwiseEqualToOneRank(t *testing.T) {
	sweep{strategy: Heads}.run(t, func(b *bench, k *testCase, scan bool) error {
		return b.bitsOfOne(k, host)
	})
}

// bitsOfOne runs a case on the ranks and on one rank, and compares the results bitwise.
func (b *bench) bitsOfOne(k *testCase, kind devicetest.Kind) error {
	r := prepare(b, k, true, false)
	must(r.run())
	whole := *k
	whole.batch.Rows = nil
	one := prepare(open(kind, alone()), &whole, true, false)
	must(one.run())
	want := one.results()
	for i, x := range r.results() {
		lo := r.x.Lo()
		if x.whole {
			lo = 0
		}
		if err := sameBits(x.name, b.host(x.t), one.host(want[i].t), lo); err != nil {
			return err
		}
	}
	one.close()
	return nil
}

// A second run, and recomputing the output from Saved, give bitwise equal results, also if the
// memory had other values before.
func TestRepeatedCallsBitwiseEqual(t *testing.T) {
	sweep{cases: slowCases}.run(t, func(b *bench, k *testCase, scan bool) error {
		r, again := prepare(b, k, true, scan), prepare(b, k, true, scan)
		must(r.run())
		must(again.run())
		must(b.dev.Fill(b.stream, again.a.Workspace, 0x7f))
		if again.a.Out.Numel() > 0 {
			must(b.dev.Fill(b.stream, again.a.Out, 0))
		}
		must(again.p.Recompute(b.stream, again.x, &again.a))
		must(again.p.Backward(b.stream, again.x, &again.a, &again.g))
		want := r.results()
		for i, x := range again.results() {
			if err := sameBits(x.name, b.host(x.t), b.host(want[i].t), 0); err != nil {
				return err
			}
		}
		// Without Saved, the output is the same.
		if must(b.dev.Fill(b.stream, again.a.Workspace, 0xff)); again.a.Out.Numel() > 0 {
			must(b.dev.Fill(b.stream, again.a.Out, 0))
		}
		again.a.Saved = tensor.Tensor{}
		must(again.p.Forward(b.stream, again.x, &again.a))
		return sameBits("out without saved", b.host(again.a.Out), b.host(r.a.Out), 0)
	})
}

// fakes are test devices with different orders of axes. Their arithmetic is the CPU's.
func fakes() []devicetest.Kind {
	return []devicetest.Kind{devicetest.Fake("tokens first", fake.Options{}),
		devicetest.Fake("heads first", fake.Options{HeadMajor: true})}
}

// slowCases are the cases for tests on slow devices: one for each way in which ranks, heads or
// documents are uneven.
var slowCases = []string{"257 1 253 257 1 253 2", "keys across ranks", "fewer heads than ranks",
	"fewer tokens than ranks", "documents in rows"}

// A device whose operations run late and in random order between streams, and whose memory the host
// cannot read, gives results that are bitwise equal to the CPU's.
func TestTestDeviceBitwiseEqualToCPU(t *testing.T) {
	sweep{kinds: fakes(), cases: slowCases, most: 4}.run(t, func(b *bench, k *testCase, scan bool) error {
		r := prepare(b, k, true, scan)
		must(r.run())
		inner, err := b.comm.Split(0, b.comm.Rank())
		must(err)
		h := open(host, hostOf(inner))
		w := prepare(h, k, true, scan)
		must(w.run())
		want := w.results()
		for i, x := range r.results() {
			if err := sameBits(x.name, b.host(x.t), h.host(want[i].t), 0); err != nil {
				return err
			}
		}
		h.close()
		return b.gapsIntact()
	})
}

// hostOf returns the communicator for host tensors that a communicator for device tensors uses.
func hostOf(c comm.Comm) comm.Comm {
	if counted, ok := c.(*comm.Counted); ok {
		c = counted.Inner()
	}
	if l, ok := c.(comm.Layered); ok {
		c = l.Host()
	}
	return c
}

// limit is the largest error of a result of the core. F32 results of a BF16 call have the error of
// products of two BF16 numbers.
func (k *testCase) limit(x result) float64 {
	roundings := 1.0
	if x.name == "dq" || x.name == "dk" {
		roundings += float64(k.layer.ValueHeads / k.layer.KeyHeads)
	}
	switch {
	case k.layer.DType == tensor.F32:
		return 2e-5
	case x.t.DType == tensor.F32:
		return 1e-4
	}
	return 1e-4 + roundings/256
}

// In BF16, results with Heads are bitwise equal to one rank's as well: gates are sent in F32 in the
// same all-to-all. With both strategies the error is that of roundings to BF16, 2^-8 each: one of
// each result, and for dq and dk one more per value head before the sum.
func TestBF16(t *testing.T) {
	for _, on := range []devicetest.Kind{fakes()[0], host} {
		sweep{kinds: []devicetest.Kind{on}, dtypes: []tensor.DType{tensor.BF16}, cases: slowCases, most: 4}.run(t,
			func(b *bench, k *testCase, scan bool) error {
				if k.layer.Strategy == Heads {
					if err := b.bitsOfOne(k, on); err != nil {
						return err
					}
				}
				r := prepare(b, k, true, scan)
				must(r.run())
				for _, x := range r.results() {
					if err := near(b, r.x, []result{x}, r.reference(k), k.limit(x)); err != nil {
						return err
					}
				}
				return nil
			})
	}
}

// A hundred equal calls give bitwise equal results.
func TestHundredCallsBitwiseEqual(t *testing.T) {
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			for _, way := range strategies {
				b := open(host, c)
				k := testCase{name: "hundred", layer: small, batch: packed(11, 90, 4)}
				k.layer.Strategy = way.strategy
				r := prepare(b, &k, true, way.scan)
				must(r.run())
				var first []tensor.Tensor
				for _, x := range r.results() {
					first = append(first, b.host(x.t))
				}
				for range 99 {
					must(r.run())
					for i, x := range r.results() {
						if err := sameBits(x.name, b.host(x.t), first[i], 0); err != nil {
							return err
						}
					}
				}
				b.close()
			}
			return nil
		})
	}
}

// The bytes sent with State do not depend on the number of tokens, with Heads they do. The test
// compares two batches whose documents have the same proportions.
func TestStateSendsTheSameForTwiceTheTokens(t *testing.T) {
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			for _, way := range strategies {
				var sent [2][2]int64
				for i, seq := range []int64{240, 480} {
					b := open(host, c)
					k := testCase{name: "twice", layer: small, batch: packed(seq/4, seq*3/4)}
					k.layer.Strategy = way.strategy
					r := prepare(b, &k, false, way.scan)
					before := b.sent()
					must(r.p.Forward(b.stream, r.x, &r.a))
					sent[i][0] = b.sent() - before
					must(r.p.Backward(b.stream, r.x, &r.a, &r.g))
					sent[i][1] = b.sent() - before - sent[i][0]
					b.close()
				}
				twice := [2]int64{2 * sent[0][0], 2 * sent[0][1]}
				if way.strategy == State {
					twice = sent[0]
				}
				if sent[1] != twice {
					return fmt.Errorf("%s sends %v bytes for 240 tokens and %v for 480", way.name, sent[0], sent[1])
				}
			}
			return nil
		})
	}
}
