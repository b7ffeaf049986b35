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

// finite looks for results that are NaN or Inf, on rank 0, where all of them come by on
// their way into the output's file.
type finite struct {
	// whether a query sees a key; the lse of one that does not is rightly -inf
	sees  func(token int64) bool
	found []*unfinite
}

// unfinite is what is NaN or Inf in one tensor, whose bytes are written to it in order.
type unfinite struct {
	*finite
	tensor    *sharded
	at, count int64 // values seen; of them NaN or Inf
	first     int64 // its place, counted row by row
	value     float32
}

// of looks at the bytes of a tensor.
func (f *finite) of(t *sharded) io.Writer {
	x := &unfinite{finite: f, tensor: t}
	f.found = append(f.found, x)
	return x
}

// Write is given whole values.
func (x *unfinite) Write(bytes []byte) (int, error) {
	dtype := x.tensor.part.DType
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
		if v-v != 0 && !x.right(v) { // NaN and the infinities alone
			if x.count == 0 {
				x.first, x.value = x.at, v
			}
			x.count++
		}
		x.at++
	}
	return len(bytes), nil
}

func (x *unfinite) right(v float32) bool {
	return x.tensor.name == "lse" && math.IsInf(float64(v), -1) && !x.sees(x.at/x.tensor.shape[1])
}

// seesKey says whether a query sees a key of its document, as device.Attention has it.
func seesKey(token int64, cuQ, cuK []int64, l sp.Layer) bool {
	d := sort.Search(len(cuQ), func(i int) bool { return cuQ[i] > token }) - 1
	keys := cuK[d+1] - cuK[d]
	at := keys - (cuQ[d+1] - token) // where the query stands among them
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
	return lo < hi
}

// axes are the names of a result's axes, by their number.
var axes = map[int]string{2: "token, head", 3: "token, head, feature", 4: "document, head, key feature, value feature"}

// err names each tensor that is not finite throughout, and the first place in it.
func (f *finite) err(kind string) error {
	var found []string
	for _, x := range f.found {
		if x.count > 0 {
			shape := x.tensor.shape
			found = append(found, fmt.Sprintf("%s%s [%s] is %v, %d of its %d values are NaN or Inf", x.tensor.name, place(shape, x.first), axes[len(shape)],
				x.value, x.count, x.at))
		}
	}
	if len(found) == 0 {
		return nil
	}
	return status.Errorf(status.Numeric, "%s: %s: all that was read is finite, so a product or a sum was too large for its type: scale the input down, or lower %s.scale",
		kind, strings.Join(found, "; "), kind)
}
