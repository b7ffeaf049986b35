package conformance

import "testing"

// wide is the elements to which an aligned layout rounds gaps and shifts: vectors of 16 bytes, of
// any type from BF16 up.
const wide = 8

// aligned is the layout with memory and rows where arenas and models put them. Elsewhere in the
// suite most arrays lie on odd addresses, where devices cannot use their widest loads.
func (l layout) aligned() layout {
	l.gap, l.shift = (l.gap+wide-1)/wide*wide, 0
	return l
}

// testAligned repeats the operations that have a kernel of their own for such memory.
func testAligned(s *suite) {
	for _, f := range []struct {
		name string
		test func(s *suite)
	}{
		{"Add", testAdd}, {"Scale", testScale}, {"ColumnSum", testColumnSum}, {"Sum", testSum}, {"RMSNorm", testRMSNorm}, {"Rope", testRope},
		{"SwiGLU", testSwiGLU}, {"Embedding", testEmbedding}, {"CrossEntropy", testCrossEntropy}, {"AdamW", testAdamW}, {"SGD", testSGD},
		{"GatedRMSNorm", testGatedRMSNorm}, {"SigmoidGate", testSigmoidGate}, {"Conv1d", testConv1d},
	} {
		s.t.Run(f.name, func(t *testing.T) {
			c := *s
			c.t, c.aligned = t, true
			f.test(&c)
		})
	}
}
