package operator

import (
	"io"
	"unsafe"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// sharded is a tensor whose rows are cut over the ranks.
type sharded struct {
	name  string
	part  tensor.Tensor // this rank's rows, dense, in the device's memory
	shape []int64       // of the whole; axis 0 is rows
	rows  int64
}

// shards is sharded tensors on their way into a file: through the host, in pieces of at most so
// many bytes, or of one row.
type shards struct {
	comm   comm.Comm // its host side
	dev    device.Device
	stream device.Stream
	limit  int64
	piece  []byte
}

// writeSharded writes tensors into one safetensors file, on rank 0, without holding any of them
// whole; look is shown them there. It is collective and fails on all ranks alike; a file that
// cannot be written is not there.
func writeSharded(c comm.Comm, d device.Device, s device.Stream, path string, metadata map[string]string, items []sharded, look *finite, limit int64) error {
	w := &shards{comm: c, dev: d, stream: s, limit: limit}
	if c.Rank() != 0 {
		var err error
		for i := range items {
			if err = w.send(&items[i]); err != nil {
				break
			}
		}
		return comm.Agree(c, err)
	}
	// Peers send everything, in order, whatever becomes of the file. done counts the tensors that
	// have come.
	done := 0
	files := make([]tensor.Item, len(items))
	for i := range items {
		t := &items[i]
		files[i] = tensor.Item{Name: t.name, Tensor: tensor.Of(nil, t.part.DType, t.shape...), Write: func(out io.Writer) error {
			done = i + 1
			return w.receive(t, io.MultiWriter(out, look.of(t)))
		}}
	}
	err := tensor.WriteSafetensors(path, metadata, files)
	for ; done < len(items); done++ {
		if lost := w.receive(&items[done], io.Discard); lost != nil {
			return lost // no peer to agree with
		}
	}
	return comm.Agree(c, err)
}

// flat views this rank's rows as bytes [n, bytes of a row].
func (t *sharded) flat() tensor.Tensor {
	row := t.rowBytes()
	x := tensor.Of(t.part.Data, tensor.U8, t.part.Bytes()/row, row)
	x.Where = t.part.Where
	return x
}

func (t *sharded) rowBytes() int64 {
	return tensor.Of(nil, t.part.DType, t.shape[1:]...).Bytes()
}

// step is how many rows of a tensor travel at a time.
func (w *shards) step(t *sharded) int64 { return max(1, w.limit/t.rowBytes()) }

// buffer is memory of the host for n rows.
func (w *shards) buffer(n, row int64) tensor.Tensor {
	if int64(len(w.piece)) < n*row {
		w.piece = make([]byte, n*row)
	}
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(w.piece)), tensor.U8, n, row)
}

// own calls f with this rank's rows, piece by piece, in memory of the host. An error of the device
// does not keep f from being called, for a peer may wait for what it sends.
func (w *shards) own(t *sharded, f func(rows tensor.Tensor) error) error {
	part, step := t.flat(), w.step(t)
	var failed error
	for lo := int64(0); lo < part.Shape[0]; lo += step {
		rows := part.Slice(0, lo, min(lo+step, part.Shape[0]))
		if rows.Where != tensor.Host {
			host := w.buffer(rows.Shape[0], rows.Shape[1])
			if failed == nil {
				failed = w.dev.Copy(w.stream, host, rows)
			}
			if failed == nil {
				failed = w.stream.Sync()
			}
			rows = host
		}
		if err := f(rows); err != nil {
			return err
		}
	}
	return failed
}

// send brings this rank's rows to rank 0.
func (w *shards) send(t *sharded) error {
	return w.own(t, func(rows tensor.Tensor) error { return w.comm.SendRecv(nil, tensor.Tensor{}, -1, rows, 0) })
}

// receive writes all rows in order. After a write error it goes on receiving, so that no peer is
// left waiting.
func (w *shards) receive(t *sharded, out io.Writer) error {
	var err error
	failed := w.own(t, func(rows tensor.Tensor) error {
		if err == nil {
			_, err = out.Write(rows.RawBytes())
		}
		return nil
	})
	if err == nil {
		err = failed
	}
	step := w.step(t)
	for from := 1; from < w.comm.Size(); from++ {
		lo, hi := comm.Shard(t.rows, w.comm.Size(), from)
		for ; lo < hi; lo += step {
			rows := w.buffer(min(step, hi-lo), t.rowBytes())
			if lost := w.comm.SendRecv(nil, rows, from, tensor.Tensor{}, -1); lost != nil {
				return lost
			}
			if err == nil {
				_, err = out.Write(rows.RawBytes())
			}
		}
	}
	return err
}
