// Package conformance is what the tests of every device contain: each operation of device.Ops
// against package ref.
//
// A case places its arrays in device memory among sentinels, runs the operation on one worker,
// holds the results against the float64 reference, looks whether anything but the results was
// written, and runs again on three workers, twice: the bits must not change.
//
// An emulated GPU takes thousands of times as long as others. There a case runs again once, in yet
// another order of blocks and threads, and arrays that are long so that large tiles and many
// workers have something to do are shorter (suite.long).
package conformance

import (
	"bytes"
	"hash/crc64"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// Opener opens the device under test with a number of workers. Devices without workers may ignore
// it.
type Opener func(t testing.TB, workers int) device.Device

// Run runs every case of every operation.
func Run(t *testing.T, open Opener) { run(t, open, suite{repeatable: true}) }

// RunSome runs every case of the operations named.
func RunSome(t *testing.T, open Opener, names ...string) {
	run(t, open, suite{repeatable: true}, names...)
}

// RunAttentionFew runs a part of attention's cases: for kernels that differ in a constant from
// those that run them all.
func RunAttentionFew(t *testing.T, open Opener) {
	run(t, open, suite{repeatable: true, few: true}, "Attention")
}

// RunAttentionTiled runs attention's cases in BF16 whose heads are multiples of 16: for kernels on
// tensor cores, which serve no others.
func RunAttentionTiled(t *testing.T, open Opener) {
	run(t, open, suite{repeatable: true, tiled: true}, "Attention", "AttentionWide", "AttentionLaws")
}

// RunChoosing runs them on a device that chooses attention's kernel by heads and layout: it repeats
// a call to the bit, but the laws between different calls hold for each of its kernels alone.
func RunChoosing(t *testing.T, open Opener) {
	run(t, open, suite{repeatable: true, choosing: true})
}

// RunUnrepeatable runs them on a device that was not asked for the same bits in every run, and
// leaves out what compares bits of two runs.
func RunUnrepeatable(t *testing.T, open Opener) { run(t, open, suite{}) }

// RunBare runs the operations named on arrays that are all of their allocation: where a device
// stops at what lies outside, no case may reach it.
func RunBare(t *testing.T, open Opener, names ...string) {
	run(t, open, suite{bare: true}, names...)
}

// RunDigests runs the operations named, or all, and calls digest with the name of each case and a
// hash of the bytes of its results: two builds of a device's kernels give equal bits if they give
// equal digests.
func RunDigests(t *testing.T, open Opener, digest func(name string, hash uint64), names ...string) {
	run(t, open, suite{repeatable: true, digest: digest}, names...)
}

func run(t *testing.T, open Opener, how suite, names ...string) {
	for _, f := range []struct {
		name string
		test func(s *suite)
	}{
		{"Memory", testMemory}, {"Order", testOrder}, {"Host", testHost}, {"Copy", testCopy}, {"Cast", testCast}, {"Fill", testFill}, {"Add", testAdd}, {"Scale", testScale},
		{"ColumnSum", testColumnSum}, {"Sum", testSum}, {"Gemm", testGemm}, {"RMSNorm", testRMSNorm}, {"Rope", testRope},
		{"SwiGLU", testSwiGLU}, {"Embedding", testEmbedding}, {"CrossEntropy", testCrossEntropy}, {"AdamW", testAdamW}, {"SGD", testSGD},
		{"Attention", testAttention}, {"AttentionWide", testAttentionWide}, {"AttentionLaws", testAttentionLaws},
		{"GatedRMSNorm", testGatedRMSNorm}, {"SigmoidGate", testSigmoidGate}, {"Conv1d", testConv1d}, {"DeltaGates", testDeltaGates}, {"GatedDelta", testGatedDelta}, {"DeltaStates", testDeltaStates}, {"DeltaLaws", testDeltaLaws},
		{"Aligned", testAligned}, {"Far", testFar}, {"Refusals", testRefusals}, {"DeltaRefusals", testDeltaRefusals},
	} {
		if len(names) > 0 && !slices.Contains(names, f.name) {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			if strings.HasSuffix(f.name, "Laws") && !how.repeatable {
				t.Skip("SKIPPED: a law between the bits of two runs")
			}
			if f.name == "AttentionLaws" && how.choosing {
				t.Skip("SKIPPED: a law between the bits of two calls, which different kernels may serve")
			}
			s := how
			s.t, s.one, s.three = t, open(t, 1), open(t, 3)
			defer s.one.Close()
			defer s.three.Close()
			f.test(&s)
		})
	}
}

// suite is one operation's cases on one device, opened twice.
type suite struct {
	t          *testing.T
	one, three device.Device
	repeatable bool
	aligned    bool // arrays lie as aligned says
	bare       bool // nothing lies around arrays
	few        bool // a part of attention's cases
	tiled      bool // of attention's cases those in BF16 whose heads are multiples of 16
	choosing   bool // attention's kernels are chosen by heads and layout

	digest func(name string, hash uint64) // called after each case if not nil
}

// emulated reports whether the host stands in for a GPU.
func (s *suite) emulated() bool {
	shares, ok := s.one.(interface{ SharesHostMemory() bool })
	return ok && s.one.Info().Place != tensor.Host && shares.SharesHostMemory()
}

// serves reports whether a case of attention is one of those to be run.
func (s *suite) serves(d tensor.DType, g *ref.Attention) bool {
	return !s.tiled || d == tensor.BF16 && g.D%16 == 0 && g.Dv%16 == 0
}

// long is a length that is to be many tiles of any kernel; of an emulated GPU's, which are known to
// be small, a shorter one will do.
func (s *suite) long(n, emulated int64) int64 {
	if s.emulated() {
		return emulated
	}
	return n
}

// body places arrays on a bed, runs operations and returns the results, in the order of the wants.
type body func(b *bed) ([]*array, error)

// check runs one case as the package comment says.
func (s *suite) check(name string, wants []want, f body) {
	s.t.Run(name, func(t *testing.T) {
		first := s.run(t, s.one, f, wants)
		for range s.long(2, 1) {
			again := s.run(t, s.three, f, nil)
			for i := range first {
				if s.repeatable && !bytes.Equal(first[i], again[i]) {
					t.Errorf("%s: other bits on three workers, or in the next run", wants[i].name)
				}
			}
		}
	})
}

// bits runs a case once and returns the memory of its results.
func (s *suite) bits(t *testing.T, f body) [][]byte { return s.run(t, s.one, f, nil) }

func (s *suite) run(t *testing.T, d device.Device, f body, wants []want) [][]byte {
	t.Helper()
	b := newBed(t, d)
	b.aligned, b.bare = s.aligned, s.bare
	defer b.close()
	results, err := f(b)
	if err != nil {
		t.Fatal(err)
	}
	b.finish()
	out := make([][]byte, len(results))
	for i, r := range results {
		out[i] = r.bits()
	}
	if wants != nil && len(wants) != len(results) {
		t.Fatalf("the case has %d results for %d wants", len(results), len(wants))
	}
	if s.digest != nil && d == s.one {
		s.digest(t.Name(), crc64.Checksum(bytes.Join(out, nil), crc64.MakeTable(crc64.ECMA)))
	}
	for i, w := range wants {
		if w.low > 0 {
			w.ref = rounded(tensor.BF16, results[w.low-1].values())
		}
		w.compare(t, results[i].values())
	}
	return out
}

// bed is the memory and the stream of one execution.
type bed struct {
	t      testing.TB
	dev    device.Device
	stream device.Stream
	arrays []*array

	aligned, bare bool // as the suite's
}

func newBed(t testing.TB, d device.Device) *bed {
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	return &bed{t: t, dev: d, stream: s}
}

// finish waits for the stream and looks for writes outside of results.
func (b *bed) finish() {
	b.t.Helper()
	if err := b.stream.Sync(); err != nil {
		b.t.Fatal(err)
	}
	for _, a := range b.arrays {
		a.pull(b)
		a.checkUntouched(b.t)
	}
}

func (b *bed) close() {
	for _, a := range b.arrays {
		a.buffer.Free()
	}
	b.stream.Close()
}

// seeded is the random source of a case, the same in every run.
func seeded(parts ...int64) *rand.Rand {
	h := uint64(14695981039346656037)
	for _, p := range parts {
		h = (h ^ uint64(p)) * 1099511628211
	}
	return rand.New(rand.NewPCG(h, 1))
}

// normal is n float32 values of a normal distribution.
func normal(r *rand.Rand, n int64) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(float32(r.NormFloat64()))
	}
	return x
}

// normalAs is n values of a normal distribution that a type holds exactly.
func normalAs(d tensor.DType, r *rand.Rand, n int64) []float64 { return rounded(d, normal(r, n)) }

// typed calls f for each type that activations may have on the device; the suffix of names is empty
// for F32.
func (s *suite) typed(f func(d tensor.DType, suffix string)) {
	for _, d := range s.one.Info().Compute {
		suffix := ""
		if d != tensor.F32 {
			suffix = " " + d.String()
		}
		f(d, suffix)
	}
}

// integers is n numbers of [0, limit).
func integers(r *rand.Rand, n, limit int64) []int64 {
	x := make([]int64, n)
	for i := range x {
		x[i] = r.Int64N(limit)
	}
	return x
}

func floats(x []int64) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

func testMemory(s *suite) {
	for _, bytes := range []int64{1, 63, 4096, 1 << 22} {
		b, err := s.one.Alloc(bytes)
		if err != nil {
			s.t.Fatal(err)
		}
		if b.Bytes() < bytes {
			s.t.Errorf("Alloc(%d) has %d bytes", bytes, b.Bytes())
		}
		if align := s.one.Info().Align; align < 1 || uintptr(b.Pointer())%uintptr(align) != 0 {
			s.t.Errorf("Alloc(%d) is not aligned to %d", bytes, align)
		}
		bed := newBed(s.t, s.one)
		x := &array{buffer: b, Tensor: bed.tensor(b.Pointer(), tensor.U8, bytes)}
		for i, v := range x.pull(bed) {
			if v != 0 {
				s.t.Fatalf("Alloc(%d): byte %d is %d, not zero", bytes, i, v)
			}
		}
		bed.arrays = append(bed.arrays, x)
		bed.close()
	}
	if b, err := s.one.Alloc(1 << 60); status.Of(err) != status.OutOfMemory {
		s.t.Errorf("Alloc(2^60) = %v, %v: want OutOfMemory", b, err)
	}
}
