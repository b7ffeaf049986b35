package cuda

import (
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// NoGPU describes an absent Hopper GPU with cuDNN, for plans. It returns the memory that operations
// need, without the plug-in or a driver. Its formulas repeat the formulas of the plug-in
// (attention_index.h and delta_index.h in plugin/kernels, sdpa_shape.h and sdpa_split.h in
// plugin/libraries); tests compare both.
type NoGPU struct {
	Deterministic bool // every result of the GPU is bitwise reproducible

	// as the emulated plug-in: without cuDNN, and with less memory for heads of linear attention
	emulated bool
}

// Info returns the description of a GPU without a name and with unknown memory.
func (g NoGPU) Info() device.Info { return infoOf("an absent GPU", "none", 0) }

// allocator adds up allocations, each rounded up to align bytes.
type allocator struct{ bytes int64 }

func (c *allocator) take(n, size int64) { c.bytes = roundUp(c.bytes+n*size, align) }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// bucket returns the smallest least·2^i that is at least n.
func bucket(n, least int64) int64 {
	for least < n {
		least *= 2
	}
	return least
}

// documentsOf counts the documents that have queries or keys.
func documentsOf(cuQ, cuK []int64) (n int64) {
	for i := 1; i < len(cuQ); i++ {
		if cuQ[i] > cuQ[i-1] || cuK[i] > cuK[i-1] {
			n++
		}
	}
	return n
}

// AttentionWorkspace returns the most bytes that any kernel needs for the call; 0 if the arguments
// are invalid. Given document bounds only reduce the tables; the share of cuDNN is its largest need
// for any documents.
func (g NoGPU) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	if device.Operations[device.OpAttentionForward].Check(unsafe.Pointer(a), true) != nil || a.Q.NDim != 3 ||
		a.K.NDim != 3 || a.V.NDim != 3 {
		return 0
	}
	tq, hq, tk, hkv := a.Q.Shape[0], a.Q.Shape[1], a.K.Shape[0], a.K.Shape[1]
	documents := tq + tk
	if a.CuQ != nil {
		documents = documentsOf(a.CuQ, a.CuK)
	}
	var l allocator
	for range 4 { // bounds, and tiles in the preceding documents, for queries and keys
		l.take(documents+1, 8)
	}
	l.take(documents, 8) // shifts
	l.take(hq, 8)
	l.take(hkv+1, 8)
	tables := l.bytes
	if backward {
		l.take(hq*tq, 4)
		if a.Slopes.IsNil() {
			l.take(0, 4)
		} else {
			l.take(hq*tq, 4) // terms of their gradients
		}
		if sums := a.K.DType != tensor.F32 && (a.KVHead != nil || hq > hkv); sums {
			l.take(hkv*tk*(a.K.Shape[2]+a.V.Shape[2]), 4)
		} else {
			l.take(0, 4)
		}
		if g.addsToDQ(a) {
			l.take(hq*tq*a.Q.Shape[2], 4)
		}
	}
	if g.emulated {
		return l.bytes
	}
	return max(l.bytes, tables+roundUp(g.sdpaWorkspace(a, backward), align))
}

// addsToDQ reports whether the blocks of the kernel mma add to dq in any order (mma_adds in
// attention.cu).
func (g NoGPU) addsToDQ(a *device.Attention) bool {
	d, dv, scale := a.Q.Shape[2], a.V.Shape[2], float32(a.Scale)
	return !g.Deterministic && !a.Deterministic && a.Slopes.IsNil() && a.Q.DType == tensor.BF16 && d%16 == 0 &&
		dv%16 == 0 &&
		max(d, dv) <= 256 && scale >= 1e-30 && scale <= 1e30
}

// deltaPanel is DELTA_PANEL_BYTES: the bytes for the intermediate results of a panel.
// deltaProcessors is DELTA_MULTIPROCESSORS: documents are divided into segments to occupy them.
const (
	deltaPanel, deltaPanelEmulated           = 2 << 30, 1 << 18
	deltaProcessors, deltaProcessorsEmulated = 132, 20
)

// GatedDeltaSizes returns the most bytes that any kernel needs for the call; 0 if the arguments are
// invalid.
func (g NoGPU) GatedDeltaSizes(a *device.GatedDelta) (none device.DeltaSizes) {
	if device.Operations[device.OpGatedDeltaForward].Check(unsafe.Pointer(a), true) != nil || a.K.NDim != 3 ||
		a.V.NDim != 3 {
		return none
	}
	s := deltaShape{size: a.K.DType.Size(), tokens: a.K.Shape[0], keyHeads: a.K.Shape[1], valueHeads: a.V.Shape[1],
		dk: a.K.Shape[2], dv: a.V.Shape[2], panel: deltaPanel, processors: deltaProcessors}
	if s.dk < 1 || s.dv < 1 || a.Chunk != 0 && a.Chunk < 16 || a.KeyHead == nil && s.valueHeads > 0 &&
		(s.keyHeads == 0 || s.valueHeads%s.keyHeads != 0) {
		return none
	}
	if g.emulated {
		s.panel, s.processors = deltaPanelEmulated, deltaProcessorsEmulated
	}
	if s.chunk = 64; s.dk > 128 {
		s.chunk = 32
	}
	if a.Chunk > 0 && a.Chunk < s.chunk {
		s.chunk = a.Chunk / 16 * 16
	}
	s.tokensOfPanel = a.Panel
	key := int64(-1)
	for h := range s.valueHeads {
		k := int64(0)
		if a.KeyHead != nil {
			k = a.KeyHead[h]
		} else {
			k = h / (s.valueHeads / s.keyHeads)
		}
		if k < max(key, 0) || k >= s.keyHeads {
			return none
		}
		key = k
	}
	if g.Deterministic || a.Deterministic {
		s.processors = 0
	}
	documents := s.tokens
	if a.Cu != nil {
		documents = documentsOf(a.Cu, a.Cu)
	}
	return device.DeltaSizes{Saved: s.saved(), Forward: s.workspace(documents, deltaForward),
		Backward: s.workspace(documents, deltaBackward), State: s.workspace(1, deltaState)}
}

// deltaShape has the values that the sizes of the gated delta rule depend on.
type deltaShape struct {
	size                                 int64 // bytes of an element of q, k, v and of intermediate results
	tokens, keyHeads, valueHeads, dk, dv int64
	chunk                                int64 // tokens
	panel                                int64 // bytes
	tokensOfPanel                        int64 // 0: as many as these bytes hold
	processors                           int64 // 0: documents are not divided
}

// span returns the tokens of a panel (delta_span).
func (s *deltaShape) span() int64 {
	if s.tokensOfPanel > 0 {
		return max(2, min(s.tokensOfPanel, 1<<40)/s.chunk) * s.chunk
	}
	row := 16 + s.size*(2*s.chunk+2*s.dv+2*s.dk) + (2*s.size*s.dk*s.dv+s.chunk-1)/s.chunk
	return max(2, s.panel/(max(s.valueHeads, 1)*row*s.chunk)) * s.chunk
}

func (s *deltaShape) panels() int64 { return max(1, (s.tokens+s.span()-1)/s.span()) }

// state returns the bytes of the states of all heads in F32.
func (s *deltaShape) state() int64 { return s.valueHeads * s.dk * s.dv * 4 }

// saved returns the bytes of the matrices T, of the states that panels pass on, and of what is at
// joints (DeltaSaved).
func (s *deltaShape) saved() int64 {
	var l allocator
	l.take(s.valueHeads*s.tokens*s.chunk, s.size)
	l.take((s.panels()-1)*s.state(), 1)
	joints := s.panels() * s.joints() * s.valueHeads
	l.take(joints*s.dk*s.dv, 4)
	l.take(joints*s.dk*s.dk, 4)
	return l.bytes
}

// joints returns the most boundaries between segments of a document in a panel (delta_joints).
func (s *deltaShape) joints() int64 {
	segments := s.processors / max(1, s.valueHeads*((s.dv+31)/32))
	chunks := min(s.tokens, s.span()) / s.chunk
	if segments < 2 || chunks < 2 {
		return 0
	}
	return min(segments, chunks) + 2
}

// deltaPass is an operation of the gated delta rule.
type deltaPass int

const (
	deltaForward deltaPass = iota
	deltaBackward
	deltaState
)

// workspace returns the bytes of the tables, of the states between panels, and of the intermediate
// results of a panel (delta_layout).
func (s *deltaShape) workspace(documents int64, pass deltaPass) int64 {
	var l allocator
	l.take(documents+1, 8)
	l.take(documents+1, 8)
	l.take(documents+1, 8)
	l.take(documents, 8)
	l.take(s.valueHeads, 8)
	l.take(s.keyHeads+1, 8)
	if pass != deltaState && s.panels() > 1 {
		l.take(s.state(), 1)
		l.take(s.state(), 1)
	}
	joints := int64(0)
	if pass != deltaState {
		joints = s.joints()
	}
	l.take(joints*s.valueHeads*s.dk*s.dv, 4)
	if pass != deltaBackward {
		l.take(joints*s.valueHeads*s.dk*s.dk, 4)
	}
	rows, slots := min(s.tokens, s.span()+s.chunk), min(s.tokens, s.span())/s.chunk+1
	n := s.valueHeads * rows
	l.take(s.keyHeads*rows, 4)
	l.take(s.keyHeads*rows, 4)
	l.take(n, 16)
	l.take(n*s.chunk, s.size)
	if pass != deltaBackward {
		l.take(n*s.chunk, s.size)
	}
	if pass == deltaState || pass == deltaForward && s.size == 2 { // scans in BF16 compute out
		return l.bytes
	}
	states := slots * s.valueHeads * s.dk * s.dv
	l.take(n*s.dv, s.size)
	l.take(states, s.size)
	if pass == deltaForward {
		return l.bytes
	}
	l.take(n*s.dv, s.size)
	l.take(n*s.dk, s.size)
	l.take(n*s.dk, s.size)
	l.take(states, s.size)
	return l.bytes
}
