package conformance

import "testing"

// wide is the number of elements to which an aligned layout rounds gaps: 16 bytes in BF16, more in
// wider types.
const wide = 8

// aligned returns the layout with the alignment of memory in arenas and models. Most other arrays
// in the suite are at odd addresses, where devices cannot use their widest loads.
func (l layout) aligned() layout {
	l.gap, l.shift = (l.gap+wide-1)/wide*wide, 0
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
	} {
		s.t.Run(f.name, func(t *testing.T) {
			c := *s
			c.t, c.aligned = t, true
			f.test(&c)
		})
	}
}
