package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"runtime"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

const (
	bands   = 16 // most bands of features, and tasks, of EmbeddingBackward
	minBand = 64 // fewest features of a band: whole cache lines
)

// checkIDs returns an error if an id is outside of the table.
func checkIDs(op string, ids tensor.Tensor, vocab int64) error {
	for t, id := range ids.Int32s() {
		if id < 0 || int64(id) >= vocab {
			return status.Errorf(status.Internal,
				"cpu.%s: token %d has id %d, and the table has %d rows; the data reader should have refused this id",
				op, t, id, vocab)
		}
	}
	return nil
}

// EmbeddingForward copies row ids[t] of table [V, N] to y[t], for each token t.
func (d *Device) EmbeddingForward(_ device.Stream, a *device.Embedding) error {
	defer runtime.KeepAlive(a)
	c := check{op: "EmbeddingForward"}
	t, bf16 := c.compute("table", a.Table)
	c.typed("table", a.Table, t, whatever, whatever)
	c.dense("ids", a.IDs, tensor.I32, whatever)
	c.typed("y", a.Y, t, a.IDs.Shape[0], a.Table.Shape[1])
	if c.err != nil {
		return c.err
	}
	if err := checkIDs(c.op, a.IDs, a.Table.Shape[0]); err != nil {
		return err
	}
	n, tokens := a.Table.Shape[1], a.IDs.Shape[0]
	perTask := max(1, grain/max(1, n))
	*(*C.embed_args)(d.args) = C.embed_args{table: a.Table.Data, ids: (*C.int32_t)(a.IDs.Data), y: a.Y.Data,
		tokens: C.int64_t(tokens), bf16: bf16, n: C.int64_t(n), table_row: C.int64_t(a.Table.Stride[0]),
		y_row:    C.int64_t(a.Y.Stride[0]),
		per_task: C.int64_t(perTask)}
	return d.run(C.K_embed_forward, ceilDiv(tokens, perTask))
}

// EmbeddingBackward adds dy[t] to row ids[t] of dtable [V, N], in the order of the tokens.
func (d *Device) EmbeddingBackward(_ device.Stream, a *device.EmbeddingGrad) error {
	defer runtime.KeepAlive(a)
	c := check{op: "EmbeddingBackward"}
	c.rows("dtable", a.DTable, whatever, whatever)
	c.dense("ids", a.IDs, tensor.I32, whatever)
	t, bf16 := c.compute("dy", a.DY)
	c.typed("dy", a.DY, t, a.IDs.Shape[0], a.DTable.Shape[1])
	if c.err != nil {
		return c.err
	}
	if err := checkIDs(c.op, a.IDs, a.DTable.Shape[0]); err != nil {
		return err
	}
	n, tokens := a.DTable.Shape[1], a.IDs.Shape[0]
	perTask := max(minBand, ceilDiv(ceilDiv(n, bands), minBand)*minBand)
	*(*C.embed_grad_args)(d.args) = C.embed_grad_args{ids: (*C.int32_t)(a.IDs.Data), dy: a.DY.Data,
		dtable: floatsOf(a.DTable), bf16: bf16, tokens: C.int64_t(tokens), n: C.int64_t(n),
		dy_row: C.int64_t(a.DY.Stride[0]), table_row: C.int64_t(a.DTable.Stride[0]), per_task: C.int64_t(perTask)}
	return d.run(C.K_embed_backward, ceilDiv(n, perTask))
}
