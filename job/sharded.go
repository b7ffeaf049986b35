package job

import (
	"io"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/sp"
	"ulysses/tensor"
)

// sharded is a tensor whose rows are cut over the ranks.
type sharded struct {
	name  string
	part  tensor.Tensor // this rank's rows, dense
	shape []int64       // of the whole; axis 0 is rows
	rows  int64
}

// writeSharded writes tensors into one safetensors file, on rank 0, without holding any of them whole: rows come from their ranks in
// pieces of at most piece's bytes, or of one row. It is collective and fails on all ranks alike; a file that cannot be written is not there.
func writeSharded(c comm.Comm, s device.Stream, path string, metadata map[string]string, items []sharded, piece tensor.Tensor) error {
	if c.Rank() != 0 {
		var err error
		for i := range items {
			if err = items[i].send(c, s, piece.Numel()); err != nil {
				break
			}
		}
		return comm.Agree(c, err)
	}
	// Peers send everything, in order, whatever becomes of the file. done counts the tensors that have come.
	done := 0
	files := make([]tensor.Item, len(items))
	for i := range items {
		t := &items[i]
		files[i] = tensor.Item{Name: t.name, Tensor: tensor.Of(nil, t.part.DType, t.shape...), Write: func(w io.Writer) error {
			done = i + 1
			return t.receive(c, s, piece, w)
		}}
	}
	err := tensor.WriteSafetensors(path, metadata, files)
	for ; done < len(items); done++ {
		if lost := items[done].receive(c, s, piece, io.Discard); lost != nil {
			return lost // no peer to agree with
		}
	}
	return comm.Agree(c, err)
}

// flat views this rank's rows as bytes [n, bytes of a row].
func (t *sharded) flat() tensor.Tensor {
	row := t.rowBytes()
	return tensor.Of(t.part.Data, tensor.U8, t.part.Bytes()/row, row)
}

func (t *sharded) rowBytes() int64 {
	return tensor.Of(nil, t.part.DType, t.shape[1:]...).Bytes()
}

// send brings this rank's rows to rank 0.
func (t *sharded) send(c comm.Comm, s device.Stream, limit int64) error {
	part, step := t.flat(), max(1, limit/t.rowBytes())
	for lo := int64(0); lo < part.Shape[0]; lo += step {
		if err := c.SendRecv(s, tensor.Tensor{}, -1, part.Slice(0, lo, min(lo+step, part.Shape[0])), 0); err != nil {
			return err
		}
	}
	return nil
}

// receive writes all rows in order. After a write error it goes on receiving, so that no peer is left waiting.
func (t *sharded) receive(c comm.Comm, s device.Stream, piece tensor.Tensor, w io.Writer) error {
	_, err := w.Write(t.flat().RawBytes())
	row := t.rowBytes()
	step := max(1, piece.Numel()/row)
	for from := 1; from < c.Size(); from++ {
		lo, hi := sp.Shard(t.rows, int64(c.Size()), int64(from))
		for ; lo < hi; lo += step {
			rows := piece.At(0, tensor.U8, min(step, hi-lo), row)
			if lost := c.SendRecv(s, rows, from, tensor.Tensor{}, -1); lost != nil {
				return lost
			}
			if err == nil {
				_, err = w.Write(rows.RawBytes())
			}
		}
	}
	return err
}
