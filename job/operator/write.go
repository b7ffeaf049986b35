package operator

import (
	"io"
	"unsafe"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// shardedTensor is a tensor whose axis 0 is sharded over the ranks (comm.Shard).
type shardedTensor struct {
	name  string
	local tensor.Tensor // this rank's shard, dense, in device memory
	shape []int64       // of the whole tensor
}

// bytes views this rank's shard as bytes [n, bytes of an index of axis 0].
func (t *shardedTensor) bytes() tensor.Tensor {
	width := t.width()
	x := tensor.Of(t.local.Data, tensor.U8, t.local.Bytes()/width, width)
	x.Where = t.local.Where
	return x
}

// width returns the bytes of one index of axis 0.
func (t *shardedTensor) width() int64 {
	return tensor.Of(nil, t.local.DType, t.shape[1:]...).Bytes()
}

// shardWriter brings sharded tensors through host memory to rank 0, in blocks of at most limit
// bytes, or of one index of axis 0.
type shardWriter struct {
	comm   comm.Comm
	dev    device.Device
	stream device.Stream
	limit  int64
	block  []byte
}

// writeSharded writes tensors into one safetensors file on rank 0, which at no time has a whole
// tensor in memory. check reads all values there. If the file cannot be written, no file remains.
// Collective: all ranks return the same error.
func writeSharded(c comm.Comm, d device.Device, s device.Stream, path string, metadata map[string]string,
	all []shardedTensor, check *finiteCheck, limit int64) error {
	w := &shardWriter{comm: c, dev: d, stream: s, limit: limit}
	if c.Rank() != 0 {
		var err error
		for i := range all {
			if err = w.send(&all[i]); err != nil {
				break
			}
		}
		return comm.Agree(c, err)
	}
	// The other ranks send all tensors in order, also if the file cannot be written.
	received := 0
	items := make([]tensor.Item, len(all))
	for i := range all {
		t := &all[i]
		items[i] = tensor.Item{Name: t.name, Tensor: tensor.Of(nil, t.local.DType, t.shape...),
			Write: func(out io.Writer) error {
				received = i + 1
				return w.receive(t, io.MultiWriter(out, check.add(t)))
			}}
	}
	err := tensor.WriteSafetensors(path, metadata, items)
	for ; received < len(all); received++ {
		if lost := w.receive(&all[received], io.Discard); lost != nil {
			return lost // communication has failed: the ranks cannot agree
		}
	}
	return comm.Agree(c, err)
}

// step returns the number of indices of axis 0 in a block.
func (w *shardWriter) step(t *shardedTensor) int64 { return max(1, w.limit/t.width()) }

// buffer returns host memory for n indices of axis 0. The next call returns the same memory.
func (w *shardWriter) buffer(n, width int64) tensor.Tensor {
	if int64(len(w.block)) < n*width {
		w.block = make([]byte, n*width)
	}
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(w.block)), tensor.U8, n, width)
}

// eachBlock calls f with the blocks of this rank's shard in order, in host memory. After an error
// of the device it still calls f, because another rank may wait for the data that f sends.
func (w *shardWriter) eachBlock(t *shardedTensor, f func(block tensor.Tensor) error) error {
	local, step := t.bytes(), w.step(t)
	var failed error
	for lo := int64(0); lo < local.Shape[0]; lo += step {
		block := local.Slice(0, lo, min(lo+step, local.Shape[0]))
		if block.Where != tensor.Host {
			host := w.buffer(block.Shape[0], block.Shape[1])
			if failed == nil {
				failed = w.dev.Copy(w.stream, host, block)
			}
			if failed == nil {
				failed = w.stream.Sync()
			}
			block = host
		}
		if err := f(block); err != nil {
			return err
		}
	}
	return failed
}

// send sends this rank's shard to rank 0.
func (w *shardWriter) send(t *shardedTensor) error {
	return w.eachBlock(t, func(block tensor.Tensor) error {
		return w.comm.SendRecv(nil, tensor.Tensor{}, -1, block, 0)
	})
}

// receive writes the shards of all ranks in rank order. After a write error it continues to
// receive, so that no rank waits for it.
func (w *shardWriter) receive(t *shardedTensor, out io.Writer) error {
	var err error
	failed := w.eachBlock(t, func(block tensor.Tensor) error {
		if err == nil {
			_, err = out.Write(block.RawBytes())
		}
		return nil
	})
	if err == nil {
		err = failed
	}
	step := w.step(t)
	for from := 1; from < w.comm.Size(); from++ {
		lo, hi := comm.Shard(t.shape[0], w.comm.Size(), from)
		for ; lo < hi; lo += step {
			block := w.buffer(min(step, hi-lo), t.width())
			if lost := w.comm.SendRecv(nil, block, from, tensor.Tensor{}, -1); lost != nil {
				return lost
			}
			if err == nil {
				_, err = out.Write(block.RawBytes())
			}
		}
	}
	return err
}
