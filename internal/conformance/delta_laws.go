package conformance

import (
	"testing"

	"ulysses/tensor"
)

// testDeltaLaws compares runs with each other, bit for bit: no reference and no tolerance.
func testDeltaLaws(s *suite) {
	s.typed(func(d tensor.DType, suffix string) {
		for name, law := range map[string]func(*testing.T, tensor.DType){
			"gates of a head are independent of the others": s.gatesAlone, "a channel is independent of the others": s.channelsAlone,
			"a convolution is independent of other documents": s.convDocuments,
		} {
			s.t.Run(name+suffix, func(t *testing.T) { law(t, d) })
		}
	})
}
