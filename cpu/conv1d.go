package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// conv1dShape checks the arguments that both passes share; t is the compute type.
func conv1dShape(c *check, t tensor.DType, a *device.Conv1d) (tokens, channels, width int64) {
	c.typed("x", a.X, t, whatever, whatever)
	tokens, channels = a.X.Shape[0], a.X.Shape[1]
	c.dense("w", a.W, t, channels, whatever)
	if width = a.W.Shape[1]; width < 1 {
		c.fail("w is %v; a convolution needs a width of at least 1", a.W)
		return tokens, channels, 1
	}
	if !a.Before.IsNil() {
		c.typed("before", a.Before, t, width-1, channels)
	}
	checkDocuments(c, "Cu", a.Cu, tokens)
	if c.err == nil && width > C.ULY_SCRATCH_BYTES/C.CONV1D_CHANNEL_BYTES/C.CONV1D_MIN_BLOCK {
		c.err = status.Errorf(status.Unsupported, "cpu.%s: width %d is not supported; use at most %d", c.op, width,
			C.ULY_SCRATCH_BYTES/C.CONV1D_CHANNEL_BYTES/C.CONV1D_MIN_BLOCK)
	}
	return tokens, channels, width
}

// conv1dBlock returns the channels of a task, such that there are about `tasks` tasks and their
// sums fit in the scratch. Results do not depend on it.
func conv1dBlock(channels, width, tasks int64) int64 {
	const least = C.CONV1D_MIN_BLOCK
	fit := min(C.CONV1D_BLOCK, C.ULY_SCRATCH_BYTES/C.CONV1D_CHANNEL_BYTES/width/least*least)
	return min(fit, max(1, ceilDiv(channels, tasks*least))*least)
}

// conv1dTasks is the number of blocks of channels of the backward pass, unless they become too
// small.
const conv1dTasks = 16

// Conv1dForward writes y = silu of the causal depthwise convolution of x [T, C] with w [C, width].
// Before [width-1, C], if given, are the rows before the first document.
func (d *Device) Conv1dForward(_ device.Stream, a *device.Conv1d) error {
	c := check{op: "Conv1dForward"}
	t, bf16 := c.compute("x", a.X)
	tokens, channels, width := conv1dShape(&c, t, a)
	c.typed("y", a.Y, t, tokens, channels)
	if c.err != nil || tokens == 0 || channels == 0 {
		return c.err
	}
	defer runtime.KeepAlive(a)
	block := conv1dBlock(channels, width, 1)
	perTask := max(1, grain/2/min(block, channels))
	*(*C.conv1d_args)(d.args) = C.conv1d_args{x: a.X.Data, w: a.W.Data, before: a.Before.Data, y: a.Y.Data, bf16: bf16,
		cu: (*C.int64_t)(&a.Cu[0]), documents: C.int64_t(len(a.Cu) - 1), tokens: C.int64_t(tokens),
		channels: C.int64_t(channels), width: C.int64_t(width), x_row: C.int64_t(a.X.Stride[0]),
		before_row: C.int64_t(a.Before.Stride[0]), y_row: C.int64_t(a.Y.Stride[0]),
		block: C.int64_t(block), per_task: C.int64_t(perTask)}
	return d.run(C.K_conv1d_forward, ceilDiv(channels, block)*ceilDiv(tokens, perTask))
}

// noDocuments are the boundaries of one document without tokens.
var noDocuments = []int64{0, 0}

// Conv1dBackward writes dx and, if it is given, dbefore, and adds to dw [C, width].
func (d *Device) Conv1dBackward(_ device.Stream, a *device.Conv1dGrad) error {
	c := check{op: "Conv1dBackward"}
	t, bf16 := c.compute("x", a.X)
	tokens, channels, width := conv1dShape(&c, t, &a.Conv1d)
	c.typed("dy", a.DY, t, tokens, channels)
	c.typed("dx", a.DX, t, tokens, channels)
	c.dense("dw", a.DW, tensor.F32, channels, width)
	if !a.DBefore.IsNil() {
		c.typed("dbefore", a.DBefore, t, width-1, channels)
	}
	if c.err != nil || channels == 0 {
		return c.err
	}
	defer runtime.KeepAlive(a)
	cu := a.Cu
	if len(cu) == 1 {
		cu = noDocuments
	}
	block := conv1dBlock(channels, width, conv1dTasks)
	*(*C.conv1d_grad_args)(d.args) = C.conv1d_grad_args{x: a.X.Data, w: a.W.Data, before: a.Before.Data, dy: a.DY.Data,
		bf16: bf16, dx: a.DX.Data, dw: floatsOf(a.DW), dbefore: a.DBefore.Data, cu: (*C.int64_t)(&cu[0]),
		documents: C.int64_t(len(cu) - 1), channels: C.int64_t(channels), width: C.int64_t(width),
		x_row: C.int64_t(a.X.Stride[0]), before_row: C.int64_t(a.Before.Stride[0]), dy_row: C.int64_t(a.DY.Stride[0]),
		dx_row: C.int64_t(a.DX.Stride[0]), dbefore_row: C.int64_t(a.DBefore.Stride[0]), block: C.int64_t(block)}
	return d.run(C.K_conv1d_backward, ceilDiv(channels, block))
}
