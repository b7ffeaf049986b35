package gdn

import (
	"ulysses/device"
	"ulysses/tensor"
)

// method is a way to run the rule over ranks. headsMethod reshards from tokens to heads.
// stateMethod leaves tokens on their ranks and sends recurrent states. NewPlan chooses one; the
// rest of the package does not depend on which.
//
// A forward call is enter, passStates, the device's operation on each segment with the states that
// segmentStates returns, leave, and gatherDocs if states are wanted. A backward call has the same
// steps. A call that recomputes the output reads its inputs from Saved: enter and, with State,
// passStates send nothing. All steps but segmentStates are collective.
type method interface {
	// heads returns the heads that a rank computes.
	heads(rank int64) headRange
	// divide completes the layout of a batch: segments, and the numbers of tokens and documents.
	divide(l *layout)
	// allocate allocates the buffers of a call.
	allocate(c *call)
	// scratchBytes returns the workspace of the communication of a call and of the device's
	// operations other than the rule itself. rule has the sizes of the rule's operations.
	scratchBytes(l *layout, kind callKind, rule device.DeltaSizes) int64
	// bytesSent returns the bytes that a rank sends in a call.
	bytesSent(l *layout, rank int64, kind callKind) int64
	// describe returns details of the method, and the number of bytes sent as text, given their sum
	// over all ranks. Plan.String has both.
	describe(sent int64) (details, traffic string)

	// enter brings the caller's tensors into the buffers: inputs, or in a backward call the
	// gradient of the output.
	enter(c *call) error
	// passStates brings the recurrent states of documents that began on another rank into the
	// method's own buffers; in a backward call, the gradients of states of documents that end
	// there.
	passStates(c *call) error
	// segmentStates returns the states and gradients of states for the device's operation on a
	// segment. Forward calls are in the order of the segments, backward calls in the opposite
	// order.
	segmentStates(c *call, x *segment) (documentStates, error)
	// leave brings the results to the caller's tensors: the output, or gradients.
	leave(c *call) error
	// gatherDocs sends the states after documents, or with starts the gradients of states before
	// them, from local to the tensor to [docs, Hv, Dk, Dv] of all ranks.
	gatherDocs(c *call, local, to tensor.Tensor, starts bool) error
}
