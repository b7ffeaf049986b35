package conformance

import (
	"slices"
	"testing"
)

// wide is the number of elements to which an aligned layout rounds strides: 16 bytes in BF16, more
// in wider types.
const wide = 8

// aligned returns the layout with the alignment of memory in arenas and models. Most other arrays
// in the suite are at odd addresses, where devices cannot use their widest loads. A layout with
// gaps gets those that round its strides: a row whose length is not a multiple of a vector's then
// has a gap behind it, which no vector may overwrite.
func (l layout) aligned() layout {
	if l.shift = 0; l.gap > 0 {
		l.gap, l.multiple = 0, wide
	}
	return l
}

// testAligned repeats the tests of operations that have a kernel for aligned memory.
func testAligned(s *suite) {
	for _, f := range []struct {
		name string
		test func(s *suite)
	}{
		{"Add", testAdd}, {"Scale", testScale}, {"ColumnSum", testColumnSum}, {"Sum", testSum},
		{"RMSNorm", testRMSNorm}, {"AddRMSNorm", testAddRMSNorm}, {"Rope", testRope},
		{"SwiGLU", testSwiGLU}, {"Dropout", testDropout}, {"Embedding", testEmbedding},
		{"CrossEntropy", testCrossEntropy}, {"AdamW", testAdamW}, {"SGD", testSGD},
		{"GatedRMSNorm", testGatedRMSNorm}, {"SigmoidGate", testSigmoidGate}, {"Conv1d", testConv1d},
		{"Experts", testExperts},
		{"GatedDelta", testDeltaWidths}, {"Attention", testAttention}, {"Copy", testCopy},
		{"DeltaGates", testDeltaGates},
	} {
		if len(s.onlyAligned) > 0 && !slices.Contains(s.onlyAligned, f.name) {
			continue
		}
		s.t.Run(f.name, func(t *testing.T) {
			c := *s
			c.t, c.aligned = t, true
			f.test(&c)
		})
	}
}
