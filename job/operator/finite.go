package operator

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"sort"
	"strings"

	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// finiteCheck searches results for NaN and Inf on rank 0, which writes all of them to the output.
type finiteCheck struct {
	// seesKey reports whether a query attends to any key. If not, its LSE is -Inf without a fault
	seesKey func(token, head int64) bool
	tensors []*tensorCheck
}

// tensorCheck searches one tensor. It is a writer that receives the tensor's bytes in order.
type tensorCheck struct {
	*finiteCheck
	tensor    *shardedTensor
	at, count int64 // values so far, and how many of these are NaN or Inf
	first     int64 // flat index of the first NaN or Inf
	value     float32
}

// add returns the writer that checks a tensor.
func (f *finiteCheck) add(t *shardedTensor) io.Writer {
	x := &tensorCheck{finiteCheck: f, tensor: t}
	f.tensors = append(f.tensors, x)
	return x
}

// Write checks whole values; a value must not be split over two calls.
func (x *tensorCheck) Write(bytes []byte) (int, error) {
	dtype := x.tensor.local.DType
	size := int(dtype.Size())
	for lo := 0; lo < len(bytes); lo += size {
		var v float32
		switch b := bytes[lo:]; dtype {
		case tensor.F32:
			v = math.Float32frombits(binary.LittleEndian.Uint32(b))
		case tensor.BF16:
			v = tensor.BF16ToF32(binary.LittleEndian.Uint16(b))
		default:
			return lo, status.Errorf(status.Internal, "%s is %v: its values cannot be checked", x.tensor.name, dtype)
		}
		if v-v != 0 && !x.expected(v) { // v-v is not 0 for NaN, +Inf and -Inf
			if x.count == 0 {
				x.first, x.value = x.at, v
			}
			x.count++
		}
		x.at++
	}
	return len(bytes), nil
}

// expected reports whether a value is the LSE of a query without keys, -Inf.
func (x *tensorCheck) expected(v float32) bool {
	return x.tensor.name == "lse" && math.IsInf(float64(v), -1) &&
		!x.seesKey(x.at/x.tensor.shape[1], x.at%x.tensor.shape[1])
}

// visibleKeys returns the keys [lo, hi) that a query sees by its document, the causal mask and the
// window of device.Attention.
func visibleKeys(token int64, cuQ, cuK []int64, l sp.Layer) (first, end int64) {
	d := sort.Search(len(cuQ), func(i int) bool { return cuQ[i] > token }) - 1
	keys := cuK[d+1] - cuK[d]
	at := keys - (cuQ[d+1] - token) // position of the query among the keys
	lo, hi := int64(0), keys
	if l.Causal {
		hi = min(hi, at+1)
	}
	if w := l.Window; w != nil && w.Left >= 0 && w.Left < at {
		lo = at - w.Left
	}
	if w := l.Window; w != nil && w.Right >= 0 && w.Right < keys-at {
		hi = min(hi, at+w.Right+1)
	}
	return cuK[d] + lo, cuK[d] + max(lo, hi)
}

// axes maps the number of axes of a result to their names.
var axes = map[int]string{1: "head", 2: "token, head", 3: "token, head, feature",
	4: "document, head, key feature, value feature"}

// err returns an error that names each tensor with NaN or Inf, and the first such element.
func (f *finiteCheck) err(kind string) error {
	var found []string
	for _, x := range f.tensors {
		if x.count > 0 {
			shape := x.tensor.shape
			found = append(found,
				fmt.Sprintf("%s%s [%s] is %v, %d of its %d values are NaN or Inf", x.tensor.name, index(shape, x.first),
					axes[len(shape)], x.value, x.count, x.at))
		}
	}
	if len(found) == 0 {
		return nil
	}
	return status.Errorf(status.Numeric,
		"%s: %s; the input is finite, so a product or a sum has overflowed; scale the input down",
		kind, strings.Join(found, "; "))
}
