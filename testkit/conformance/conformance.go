// Package conformance tests the operations of a device (device.Ops) against package ref. The tests
// of every device call Run.
//
// A case allocates its arrays in device memory, surrounded by sentinels. It runs the operation on
// one worker, compares the results with the float64 reference, checks that only results were
// written, and runs the operation twice more on three workers: the results must be bitwise equal.
//
// An emulated GPU is thousands of times slower. There a case runs only once more, in another order
// of blocks and threads, and arrays that are long for the sake of large tiles and many workers are
// shorter (suite.long).
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
// the number.
type Opener func(t testing.TB, workers int) device.Device

// Run runs all cases of all operations.
func Run(t *testing.T, open Opener) { run(t, open, suite{reproducible: true}) }

// RunSome runs all cases of the named tests.
func RunSome(t *testing.T, open Opener, names ...string) {
	run(t, open, suite{reproducible: true}, names...)
}

// RunAligned runs the named tests on aligned arrays.
func RunAligned(t *testing.T, open Opener, names ...string) {
	run(t, open, suite{reproducible: true, onlyAligned: names}, "Aligned")
}

// RunAttentionFew runs some of the cases of attention, for kernels that differ only in a constant
// from kernels for which all cases run.
func RunAttentionFew(t *testing.T, open Opener) {
	run(t, open, suite{reproducible: true, few: true}, "Attention", "AttentionOptions")
}

// RunAttentionTiled runs the cases of attention in BF16 whose heads have multiples of 16 features,
// for kernels on tensor cores, which support no others.
func RunAttentionTiled(t *testing.T, open Opener) {
	run(t, open, suite{reproducible: true, tiled: true}, "Attention", "AttentionWide", "AttentionLaws")
}

// RunDeltaLarge runs the cases of the gated delta rule whose keys have more than 64 features, for
// GPUs whose shared memory has room for fewer tiles of these.
func RunDeltaLarge(t *testing.T, open Opener) {
	run(t, open, suite{reproducible: true, few: true}, "GatedDelta")
}

// RunAttentionPlain is RunAttentionTiled for kernels whose tiles have up to 128 keys and that
// support no options but sinks, shifts and carry. It runs the cases whose larger head size is at
// least `from` and at most `to`.
func RunAttentionPlain(t *testing.T, open Opener, from, to int64) {
	run(t, open, suite{reproducible: true, tiled: true, plain: true, from: from, to: to}, "Attention", "AttentionWide",
		"AttentionLaws", "AttentionOptions")
}

// RunAttentionPlainBare is RunAttentionPlain as RunBare.
func RunAttentionPlainBare(t *testing.T, open Opener, from, to int64) {
	run(t, open, suite{tiled: true, plain: true, bare: true, from: from, to: to}, "Attention", "AttentionWide")
}

// RunAttentionUnrepeatable is RunAttentionTiled, with some of the cases, for a device whose
// gradients are not bitwise reproducible.
func RunAttentionUnrepeatable(t *testing.T, open Opener) {
	run(t, open, suite{tiled: true, few: true}, "Attention", "AttentionWide", "AttentionOptions")
}

// RunChoosing is Run for a device that chooses attention's kernel by heads and layout. Its calls
// are bitwise reproducible, but AttentionLaws, which compares different calls, is skipped: the
// calls may run on different kernels.
func RunChoosing(t *testing.T, open Opener) {
	run(t, open, suite{reproducible: true, choosing: true})
}

// RunUnrepeatable is Run for a device whose results are not bitwise reproducible. It skips tests
// that compare two runs.
func RunUnrepeatable(t *testing.T, open Opener) { run(t, open, suite{}) }

// RunBare runs the named tests on arrays that fill their allocations, without sentinels. It is for
// devices that detect accesses outside an allocation.
func RunBare(t *testing.T, open Opener, names ...string) {
	run(t, open, suite{bare: true}, names...)
}

// RunDigests runs the named tests, or all, and calls digest with the name of each case and a hash
// of the bytes of its results. The results of two builds are bitwise equal if the digests are
// equal.
func RunDigests(t *testing.T, open Opener, digest func(name string, hash uint64), names ...string) {
	run(t, open, suite{reproducible: true, digest: digest}, names...)
}

// Every is the distance of the cases of a test that run: with 3, each third of those that are
// compared with a reference.
var Every = 1

func run(t *testing.T, open Opener, how suite, names ...string) {
	for _, f := range []struct {
		name string
		test func(s *suite)
	}{
		{"Memory", testMemory}, {"Order", testOrder}, {"Host", testHost}, {"Copy", testCopy}, {"Cast", testCast},
		{"Fill", testFill}, {"Add", testAdd}, {"Scale", testScale},
		{"ColumnSum", testColumnSum}, {"Sum", testSum}, {"Gemm", testGemm}, {"RMSNorm", testRMSNorm},
		{"AddRMSNorm", testAddRMSNorm}, {"Rope", testRope},
		{"SwiGLU", testSwiGLU}, {"Dropout", testDropout}, {"Embedding", testEmbedding}, {"Experts", testExperts},
		{"CrossEntropy", testCrossEntropy}, {"AdamW", testAdamW}, {"SGD", testSGD},
		{"Attention", testAttention}, {"AttentionWide", testAttentionWide}, {"AttentionLaws", testAttentionLaws},
		{"AttentionOptions", testAttentionOptions},
		{"GatedRMSNorm", testGatedRMSNorm}, {"SigmoidGate", testSigmoidGate}, {"Conv1d", testConv1d},
		{"DeltaGates", testDeltaGates}, {"GatedDelta", testGatedDelta}, {"DeltaStates", testDeltaStates},
		{"DeltaLaws", testDeltaLaws},
		{"Aligned", testAligned}, {"Far", testFar}, {"Refusals", testRefusals}, {"DeltaRefusals", testDeltaRefusals},
	} {
		if len(names) > 0 && !slices.Contains(names, f.name) {
			continue
		}
		t.Run(f.name, func(t *testing.T) {
			if strings.HasSuffix(f.name, "Laws") && !how.reproducible {
				t.Skip("SKIPPED: compares the bits of two runs, which this device does not reproduce")
			}
			if f.name == "AttentionLaws" && how.choosing {
				t.Skip("SKIPPED: compares the bits of two calls, which may run on different kernels")
			}
			s := how
			s.t, s.one, s.three = t, open(t, 1), open(t, 3)
			defer s.one.Close()
			defer s.three.Close()
			f.test(&s)
		})
	}
}

// suite is a test of one operation on one device, opened with one and with three workers.
type suite struct {
	t            *testing.T
	one, three   device.Device
	reproducible bool
	aligned      bool     // arrays have the layout layout.aligned
	bare         bool     // arrays without sentinels around them
	few          bool     // only some cases of attention and of the gated delta rule
	onlyAligned  []string // tests of Aligned; none = all
	tiled        bool     // only attention's cases in BF16 whose heads have multiples of 16 features
	plain        bool     // only attention's cases of RunAttentionPlain
	from, to     int64
	choosing     bool // the device chooses attention's kernel by heads and layout
	cases        int  // checked so far, see Every

	digest func(name string, hash uint64) // called after each case if not nil
}

// emulated reports whether the device is an emulated GPU.
func (s *suite) emulated() bool {
	shares, ok := s.one.(interface{ SharesHostMemory() bool })
	return ok && s.one.Info().Place != tensor.Host && shares.SharesHostMemory()
}

// selected reports whether a case of attention runs in this suite.
func (s *suite) selected(d tensor.DType, g *ref.Attention) bool {
	if s.plain && (g.Softcap != 0 || g.Slopes != nil || g.Mask != nil || g.Dropout != 0 || max(g.D, g.Dv) < s.from ||
		max(g.D, g.Dv) > s.to) {
		return false
	}
	return !s.tiled || d == tensor.BF16 && g.D%16 == 0 && g.Dv%16 == 0
}

// long returns n, a length of many tiles of any kernel, or on an emulated GPU, whose tiles are
// small, the shorter length emulated.
func (s *suite) long(n, emulated int64) int64 {
	if s.emulated() {
		return emulated
	}
	return n
}

// body allocates arrays, runs operations and returns the results, in the order of the expected
// results.
type body func(b *bench) ([]*array, error)

// check runs one case, see the package comment.
func (s *suite) check(name string, wants []want, f body) {
	if s.cases++; (s.cases-1)%Every != 0 {
		return
	}
	s.t.Run(name, func(t *testing.T) {
		first := s.run(t, s.one, f, wants)
		for range s.long(2, 1) {
			again := s.run(t, s.three, f, nil)
			for i := range first {
				if s.reproducible && !bytes.Equal(first[i], again[i]) {
					t.Errorf("%s: the bits differ on three workers, or in another run", wants[i].name)
				}
			}
		}
	})
}

// bits runs a case once and returns the bytes of its results.
func (s *suite) bits(t *testing.T, f body) [][]byte { return s.run(t, s.one, f, nil) }

func (s *suite) run(t *testing.T, d device.Device, f body, wants []want) [][]byte {
	t.Helper()
	b := newBench(t, d)
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
		t.Fatalf("the case has %d results, %d are expected", len(results), len(wants))
	}
	if s.digest != nil && d == s.one {
		s.digest(t.Name(), crc64.Checksum(bytes.Join(out, nil), crc64.MakeTable(crc64.ECMA)))
	}
	for i, w := range wants {
		if w.low > 0 {
			w.ref = rounded(tensor.BF16, results[w.low-1].values())
		}
		if s.reproducible {
			w.terms = 0
		}
		w.compare(t, results[i].values())
	}
	return out
}

// bench is the memory and the stream of one run of a case.
type bench struct {
	t      testing.TB
	dev    device.Device
	stream device.Stream
	arrays []*array

	aligned, bare bool // see suite
}

func newBench(t testing.TB, d device.Device) *bench {
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	return &bench{t: t, dev: d, stream: s}
}

// finish waits for the stream and checks that only results were written.
func (b *bench) finish() {
	b.t.Helper()
	if err := b.stream.Sync(); err != nil {
		b.t.Fatal(err)
	}
	for _, a := range b.arrays {
		a.pull(b)
		a.checkUntouched(b.t)
	}
}

func (b *bench) close() {
	for _, a := range b.arrays {
		a.buffer.Free()
	}
	b.stream.Close()
}

// seeded returns the random source of a case, the same in every run.
func seeded(parts ...int64) *rand.Rand {
	h := uint64(14695981039346656037)
	for _, p := range parts {
		h = (h ^ uint64(p)) * 1099511628211
	}
	return rand.New(rand.NewPCG(h, 1))
}

// normal returns n float32 values of a normal distribution.
func normal(r *rand.Rand, n int64) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = float64(float32(r.NormFloat64()))
	}
	return x
}

// normalAs returns n values of a normal distribution, rounded to a type.
func normalAs(d tensor.DType, r *rand.Rand, n int64) []float64 { return rounded(d, normal(r, n)) }

// typed calls f for each type that activations may have on the device, with a suffix for names that
// is empty for F32.
func (s *suite) typed(f func(d tensor.DType, suffix string)) {
	for _, d := range s.one.Info().Compute {
		suffix := ""
		if d != tensor.F32 {
			suffix = " " + d.String()
		}
		f(d, suffix)
	}
}

// integers returns n numbers in [0, limit).
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
		bench := newBench(s.t, s.one)
		x := &array{buffer: b, Tensor: bench.tensor(b.Pointer(), tensor.U8, bytes)}
		for i, v := range x.pull(bench) {
			if v != 0 {
				s.t.Fatalf("Alloc(%d): byte %d is %d, not zero", bytes, i, v)
			}
		}
		bench.arrays = append(bench.arrays, x)
		bench.close()
	}
	if b, err := s.one.Alloc(1 << 60); status.Of(err) != status.OutOfMemory {
		s.t.Errorf("Alloc(2^60) = %v, %v: want OutOfMemory", b, err)
	}
}
