package comm

import (
	"fmt"
	"strings"
	"unsafe"

	"ulysses/tensor"
)

// suite has the tests that every communicator must pass. Each function runs on all ranks at once
// and returns the error of its rank.
var suite = []struct {
	Name string
	Run  func(c Comm) error
}{
	{"Barrier", func(c Comm) error { return c.Barrier() }},
	{"AllToAllUneven", suiteAllToAll},
	{"AllToAllEmpty", suiteAllToAllEmpty},
	{"AllToAllStart", suiteStart},
	{"AllReduce", suiteAllReduce},
	{"AllReduceNaN", suiteNaN},
	{"AllGather", suiteAllGather},
	{"ReduceScatter", suiteReduceScatter},
	{"Broadcast", suiteBroadcast},
	{"SendRecv", suiteSendRecv},
	{"Split", suiteSplit},
	{"Concurrent", suiteConcurrent},
	{"Refusals", suiteRefusals},
	{"Agree", suiteAgree},
	{"Same", suiteSame},
	{"Counted", suiteCounted},
	{"Mesh", suiteMesh},
	{"Align", suiteAlign},
}

var allTypes = []tensor.DType{tensor.F32, tensor.BF16, tensor.F16, tensor.F64, tensor.I32, tensor.I64, tensor.U8}

func newTensor(d tensor.DType, shape ...int64) tensor.Tensor {
	n := tensor.Of(nil, d, shape...).Bytes()
	words := make([]int64, (n+7)/8)
	if n == 0 {
		return tensor.Of(nil, d, shape...)
	}
	return tensor.Of(unsafe.Pointer(&words[0]), d, shape...)
}

// wrong returns the error of a failed check.
func wrong(format string, args ...any) error { return fmt.Errorf(format, args...) }

func suiteBroadcast(c Comm) error {
	for root := range c.Size() {
		for _, n := range []int64{0, 1, 100003} {
			t := newTensor(tensor.BF16, n)
			if c.Rank() == root {
				for k, b := 0, t.RawBytes(); k < len(b); k++ {
					b[k] = pattern(root, 1, int64(k), n)
				}
			}
			if err := c.Broadcast(nil, t, root); err != nil {
				return err
			}
			for k, got := range t.RawBytes() {
				if got != pattern(root, 1, int64(k), n) {
					return wrong("broadcast of %v from %d: byte %d is %d", t, root, k, got)
				}
			}
		}
		for _, text := range []string{"", "job", strings.Repeat("long", 5000)} {
			var mine []byte
			if c.Rank() == root {
				mine = []byte(text)
			}
			got, err := BroadcastBytes(c, mine, root)
			if err != nil {
				return err
			}
			if string(got) != text {
				return wrong("broadcast of %d bytes from %d: got %d bytes", len(text), root, len(got))
			}
		}
	}
	return nil
}
