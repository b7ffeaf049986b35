package train

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// Weights stores the parameters, their gradients and the optimizer state over all ranks. Replicated
// is ZeRO stage 0, ZeRO is stages 1 to 3. Partial has a second storage for frozen parameters, and
// Divided one for experts that are divided among ranks. Frozen parameters are not in the gradients
// and states that the methods of a step concern.
//
// A step calls Begin, then the methods of model.Weights in each pass, then Reduce, then Update.
type Weights interface {
	model.Weights
	// Begin starts an optimizer step of the given number of micro-batches. It sets the gradients to
	// zero.
	Begin(s device.Stream, microBatches int64) error
	// Reduce sums the gradients over all ranks and returns their Euclidean norm. Collective.
	Reduce(s device.Stream) (norm float64, err error)
	// Update runs step t of the optimizer, counted from 1, with the gradient times scale.
	// Collective.
	Update(s device.Stream, lr, scale float64, t int64) error
	// Loaded must be called after each rank has filled the elements that it owns. Collective.
	Loaded(s device.Stream) error
	// Portions lists all parameters in the portions that Whole gathers, the same on every rank.
	Portions() []model.Portion
	// Whole gathers a portion between steps: its weights, or with grads its gradients (after
	// Reduce, before the next Begin). The result [numel] is F32, or of the compute type for weights
	// without an optimizer. It is valid until the next call. Gathering weights overwrites
	// gradients. Collective.
	Whole(x model.Portion, grads bool, s device.Stream) (tensor.Tensor, error)
	// Stored lists the portions of which this rank owns elements or may own some: all of an
	// evaluation, otherwise the trained ones.
	Stored() []Stored
	// Offloaded reports whether the optimizer's states are in host memory, and not in the device's.
	Offloaded() bool
	// Components lists the allocated memory for the memory table.
	Components() []model.Component
	// Arenas returns the arenas of this memory.
	Arenas() []*device.Arena
	// Traffic returns the bytes that this rank must have sent so far, by formula.
	Traffic() []Traffic
	Free()
}

// State has views of the elements [Lo, Hi) of a group, which one rank owns. Each is flat [Hi - Lo],
// or nil if there is no such buffer. Master and the moments may be in the host's memory.
type State struct {
	Lo, Hi  int64
	Master  tensor.Tensor // the weights that the optimizer updates: F32 when training
	Compute tensor.Tensor // their copy of the compute type; nil if passes read Master
	M, V    tensor.Tensor // moments of AdamW, F32
}

// Stored is a portion of parameters and the elements of it that this rank owns.
type Stored struct {
	model.Portion
	State
	Ranks comm.Comm // over which the portion is sharded, or that all have it whole
}

// slice returns elements [lo, hi) of the group. kind is an index of checkpoint.Kinds: 0 is Master,
// 1 is M, 2 is V.
func (x *State) slice(kind int, lo, hi int64) tensor.Tensor {
	t := [...]tensor.Tensor{x.Master, x.M, x.V}[kind]
	if t.IsNil() {
		return t
	}
	return t.Slice(0, lo-x.Lo, hi-x.Lo)
}

// Traffic is the number of bytes that this rank must have sent to other ranks in one operation on
// one axis of the mesh, by formula.
type Traffic struct {
	Axis, Op string
	What     string // what is sent
	Bytes    int64
}
