package comm

import (
	"cmp"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// transport moves bytes between processes. Except for open and hasAllToAll, its methods are
// collective. MPI and a host program's callbacks implement it. collectives implements the methods
// of Comm that need only a transport.
type transport interface {
	Rank() int
	Size() int
	// open returns an error if the communicator is closed or its job has ended.
	open(operation string) error
	// hasAllToAll reports whether allToAll works. Without it, AllReduce uses allGather alone.
	hasAllToAll() bool
	// allToAll sends the blocks of src that l describes and receives into dst. Received blocks lie
	// one after another in rank order. A rank's own block is empty.
	allToAll(operation string, dst, src unsafe.Pointer, l layout) error
	// allGather collects n bytes of own from every rank, in rank order, into all. own is not part
	// of all.
	allGather(operation string, all, own unsafe.Pointer, n int64) error
	// allGatherV collects bytes[j] bytes from rank j, in rank order, into all. own may be this
	// rank's position in all.
	allGatherV(operation string, all, own unsafe.Pointer, bytes []int64) error
}

// layout describes the blocks of an all-to-all: for each rank, the offset and the bytes of the
// block to send (s) and of the block to receive (r).
type layout struct {
	soffsets, sbytes, roffsets, rbytes []int64
}

// reduceScratch is the limit in bytes of the blocks that a rank receives before it adds them. A
// longer reduction runs in rounds. Tests lower the limit.
var reduceScratch int64 = 8 << 20

// smallReduce is the limit in bytes, over all ranks, up to which every rank reduces the whole
// tensor. That needs one collective; reducing a shard on each rank needs two.
const smallReduce = 64 << 10

// collectives implements AllGather, AllReduce and ReduceScatter over a transport.
//
// A reduction is an all-to-all, and the function reduce adds the blocks. The library's reductions
// are not used, because the order of their sums depends on the algorithm, on sizes and on the
// placement of ranks. The order here is always rank order, so a job gives bitwise equal results
// with goroutine ranks, under mpirun and under srun. A reduce-scatter and an all-gather send the
// same number of bytes, which is the minimum.
type collectives struct {
	t          transport
	rank, size int

	scratch []byte
	blocks  []unsafe.Pointer // by rank, for reduce
	bytes   []int64          // by rank, for allGatherV
	vectors []int64          // the four vectors of a layout
}

// newCollectives returns the collectives of a transport whose rank and size are known.
func newCollectives(t transport, rank, size int) collectives {
	return collectives{t: t, rank: rank, size: size, blocks: make([]unsafe.Pointer, size),
		bytes: make([]int64, size), vectors: make([]int64, 4*size)}
}

// layout returns an empty layout. It is valid until the next call.
func (c *collectives) layout() layout {
	clear(c.vectors)
	v, n := c.vectors, c.size
	return layout{v[:n], v[n : 2*n], v[2*n : 3*n], v[3*n:]}
}

// contiguous fills offsets and bytes for blocks of rows that follow each other without gaps.
func contiguous(offsets, bytes []int64, rows []int64, row int64) {
	at := int64(0)
	for j, n := range rows {
		offsets[j], bytes[j] = at, n*row
		at += n * row
	}
}

// roundBytes returns the bytes of one rank that a round moves through scratch. It is the same on
// all ranks.
func (c *collectives) roundBytes() int64 { return max(reduceScratch/int64(c.size)/64*64, 64) }

// space returns scratch memory, nil for 0 bytes. It is valid until the next call.
func (c *collectives) space(bytes int64) unsafe.Pointer {
	return pointer(resize(&c.scratch, bytes))
}

func (c *collectives) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	const name = "comm.AllGather"
	if err := cmp.Or(c.t.open(name), checkShards(name, "dst", "src", dst, src, rows, c.rank, c.size),
		waitFor(s)); err != nil {
		return err
	}
	for j := range c.bytes {
		c.bytes[j] = rows[j] * rowBytes(dst)
	}
	return c.t.allGatherV(name, dst.Data, src.Data, c.bytes)
}

func (c *collectives) AllReduce(s device.Stream, t tensor.Tensor, op Op) error {
	const name = "comm.AllReduce"
	if err := cmp.Or(c.t.open(name), checkReduce(name, t, op), waitFor(s)); err != nil {
		return err
	}
	bytes, elem := t.Bytes(), t.DType.Size()
	if c.size == 1 || bytes == 0 {
		return nil
	}
	if !c.t.hasAllToAll() || bytes*int64(c.size) <= smallReduce {
		return c.reduceGathered(name, op, t)
	}
	shard := func(j int) (at, n int64) {
		lo, hi := Shard(t.Numel(), c.size, j)
		return lo * elem, (hi - lo) * elem
	}
	at, n := shard(c.rank)
	own := blockAt(t.Data, at, n)
	if err := c.reduceShards(name, op, t.DType, own, t.Data, shard); err != nil {
		return err
	}
	for j := range c.bytes {
		_, c.bytes[j] = shard(j)
	}
	return c.t.allGatherV(name, t.Data, own, c.bytes)
}

func (c *collectives) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	const name = "comm.ReduceScatter"
	if err := cmp.Or(c.t.open(name), checkShards(name, "src", "dst", src, dst, rows, c.rank, c.size),
		checkReduce(name, src, Sum), waitFor(s)); err != nil {
		return err
	}
	row := rowBytes(src)
	shard := func(j int) (at, n int64) { return before(rows, j) * row, rows[j] * row }
	return c.reduceShards(name, Sum, src.DType, dst.Data, src.Data, shard)
}

// reduceGathered reduces t on every rank, from the tensors of all ranks.
func (c *collectives) reduceGathered(name string, op Op, t tensor.Tensor) error {
	for lo, all := int64(0), t.Bytes(); lo < all; lo += c.roundBytes() {
		n := min(c.roundBytes(), all-lo)
		in, own := c.space(n*int64(c.size)), unsafe.Add(t.Data, lo)
		if err := c.t.allGather(name, in, own, n); err != nil {
			return err
		}
		for j := range c.blocks {
			c.blocks[j] = unsafe.Add(in, int64(j)*n)
		}
		reduce(op, t.DType, own, c.blocks, n/t.DType.Size())
	}
	return nil
}

// reduceShards writes this rank's shard of src, reduced over the ranks, to dst. shard returns the
// offset and the bytes of a rank's shard. It runs in rounds, which keeps the scratch small.
func (c *collectives) reduceShards(name string, op Op, dtype tensor.DType, dst, src unsafe.Pointer,
	shard func(rank int) (at, n int64)) error {
	round, longest := c.roundBytes(), int64(0)
	for j := range c.size {
		_, n := shard(j)
		longest = max(longest, n)
	}
	own, mine := shard(c.rank)
	in := c.space(min(round, mine) * int64(c.size-1))
	for lo := int64(0); lo < longest; lo += round {
		l, now, received := c.layout(), max(0, min(round, mine-lo)), int64(0)
		for j := range c.size {
			if j == c.rank {
				continue
			}
			at, n := shard(j)
			if n = min(round, n-lo); n > 0 {
				l.soffsets[j], l.sbytes[j] = at+lo, n
			}
			l.roffsets[j], l.rbytes[j] = received, now
			received += now
		}
		if err := c.t.allToAll(name, in, src, l); err != nil {
			return err
		}
		if now == 0 {
			continue
		}
		for j := range c.blocks {
			c.blocks[j] = unsafe.Add(in, l.roffsets[j])
		}
		c.blocks[c.rank] = unsafe.Add(src, own+lo)
		reduce(op, dtype, unsafe.Add(dst, lo), c.blocks, now/dtype.Size())
	}
	return nil
}
