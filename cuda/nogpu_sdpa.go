package cuda

import (
	"math"

	"ulysses/device"
	"ulysses/tensor"
)

// Limits of the calls that cuDNN gets: see sdpa_shape.h and sdpa_split.h in plugin/libraries.
const (
	sdpaDocuments = 8192
	sdpaTokens    = 1 << 24
	sdpaRound     = 128
	sdpaSubcalls  = 8
	sdpaElements  = 1<<31 - 256
)

// sdpaWorkspace returns the most bytes that cuDNN needs for any documents of the call, without the
// tables of documents; 0 if cuDNN does not support the call.
func (g NoGPU) sdpaWorkspace(a *device.Attention, backward bool) (bytes int64) {
	if (g.Deterministic || a.Deterministic) && backward {
		return 0 // its backward pass is not bitwise reproducible
	}
	calls, ok := splitForSDPA(a)
	if !ok {
		return 0
	}
	for i := range calls {
		bound, ok := sdpaBound(&calls[i], backward)
		if !ok {
			return 0
		}
		bytes = max(bytes, bound)
	}
	return bytes
}

// sdpaLeaves reports whether a call has an option that cuDNN does not get.
func sdpaLeaves(a *device.Attention) bool {
	return !a.Sinks.IsNil() || !a.Slopes.IsNil() || !a.BlockMask.IsNil() || a.Shift != nil || a.Softcap != 0 ||
		a.Dropout != 0 || a.Carry
}

// splitForSDPA splits a call whose key heads have different numbers of query heads into calls with
// equal numbers (sdpa_split in sdpa_split.h). The calls are views, without documents.
func splitForSDPA(a *device.Attention) (calls []device.Attention, ok bool) {
	hq, hkv := a.Q.Shape[1], a.K.Shape[1]
	if a.Out.NDim != 3 || hq == 0 || hkv == 0 || sdpaLeaves(a) {
		return nil, false
	}
	whole := *a
	whole.KVHead, whole.CuQ, whole.CuK = nil, nil, nil
	if a.KVHead == nil {
		return []device.Attention{whole}, hq%hkv == 0
	}
	type subcall struct{ q, hq, k, hkv int64 }
	var subcalls []subcall
	kv := int64(0)
	for from := int64(0); from < hq; kv++ {
		to := from
		for to < hq && a.KVHead[to] == kv {
			to++
		}
		if to == from {
			return nil, false
		}
		if n := len(subcalls); n > 0 && subcalls[n-1].hq == subcalls[n-1].hkv*(to-from) {
			subcalls[n-1].hq, subcalls[n-1].hkv = subcalls[n-1].hq+to-from, subcalls[n-1].hkv+1
		} else if n == sdpaSubcalls {
			return nil, false
		} else {
			subcalls = append(subcalls, subcall{from, to - from, kv, 1})
		}
		from = to
	}
	for _, p := range subcalls {
		of := whole
		of.Q, of.Out = whole.Q.Slice(1, p.q, p.q+p.hq), whole.Out.Slice(1, p.q, p.q+p.hq)
		of.K, of.V = whole.K.Slice(1, p.k, p.k+p.hkv), whole.V.Slice(1, p.k, p.k+p.hkv)
		calls = append(calls, of)
	}
	return calls, kv == hkv
}

// sdpaStrides are the strides of a tensor [tokens, heads, features], in elements. An axis with one
// element has its dense stride.
type sdpaStrides struct{ token, head int64 }

func stridesOf(t tensor.Tensor) (s sdpaStrides) {
	if s.head = t.Shape[2]; t.Shape[1] > 1 {
		s.head = t.Stride[1]
	}
	if s.token = s.head * t.Shape[1]; t.Shape[0] > 1 {
		s.token = t.Stride[0]
	}
	return s
}

// byToken reports whether all heads of a token lie within the token's stride.
func (s sdpaStrides) byToken(heads, width int64) bool {
	return s.head >= width && s.token >= (heads-1)*s.head+width
}

// sdpaBound returns the most bytes that a call needs for any documents; false if cuDNN does not
// support the call. Every key head must have the same number of query heads. Gradients are assumed
// to have the strides of their tensors.
func sdpaBound(a *device.Attention, backward bool) (bytes int64, ok bool) {
	tq, tk, hq, hkv, d, dv := a.Q.Shape[0], a.K.Shape[0], a.Q.Shape[1], a.K.Shape[1], a.Q.Shape[2], a.V.Shape[2]
	if tq == 0 || tk == 0 || tq > sdpaTokens || tk > sdpaTokens {
		return 0, false
	}
	for _, t := range []tensor.Tensor{a.Q, a.K, a.V, a.Out} {
		if t.DType != tensor.BF16 || t.NDim != 3 || t.Shape[2] > 1 && t.Stride[2] != 1 || uintptr(t.Data)%16 != 0 {
			return 0, false
		}
		for axis := range 2 {
			if t.Shape[axis] > 1 && (t.Stride[axis]%8 != 0 || t.Stride[axis] < t.Shape[2]) {
				return 0, false
			}
		}
		if last := (t.Shape[0]-1)*t.Stride[0] + (t.Shape[1]-1)*t.Stride[1]; backward && last >= sdpaElements {
			return 0, false
		}
	}
	if d%8 != 0 || dv%8 != 0 || d > 256 || dv > 256 || math.IsNaN(a.Scale) || math.IsInf(a.Scale, 0) {
		return 0, false
	}
	right := int64(-1)
	if w := a.Window; w != nil && w.Right >= 0 && w.Right < tq+tk {
		right = w.Right
	}
	if a.Causal {
		right = 0
	}
	if right > 0 {
		return 0, false
	}
	if backward && d != dv && min(d, dv) >= 128 && (d != 192 || dv != 128) {
		return 0, false
	}
	q, k, v, out := stridesOf(a.Q), stridesOf(a.K), stridesOf(a.V), stridesOf(a.Out)
	byLengths := tq == 1 || backward && (right < 0 && tk%128 != 0 || hq*tq%4 != 0)
	if byLengths { // packed
		if !q.byToken(hq, d) || !k.byToken(hkv, d) || !v.byToken(hkv, dv) || !out.byToken(hq, dv) || backward &&
			(d%16 != 0 || dv%16 != 0) {
			return 0, false
		}
		tq, tk = roundUp(tq, sdpaRound), roundUp(tk, sdpaRound)
	}
	documents := min(sdpaDocuments, bucket(tq+tk, 2))
	tq, tk = roundUp(tq, sdpaRound), roundUp(tk, sdpaRound)
	const offsets = 9 // number of arrays of offsets
	var l allocator
	l.take(documents, 4)
	l.take(documents, 4)
	l.take(offsets*(documents+1), 8)
	l.take(tq*hq, 4)
	bytes = l.bytes + 32<<20
	if !backward {
		return bytes, true
	}
	bytes += 4 * tq * (max(q.token, hq*d) + hq) // the sums of dq
	if group := hq / hkv; group > 1 {           // the sums of dk and dv for every query head
		bytes += 4 * tk * group * (max(k.token, hkv*d) + max(v.token, hkv*dv))
	}
	return bytes, true
}
