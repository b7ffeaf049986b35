package comm

import (
	"cmp"
	"slices"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// begin posts the arguments of a call and waits until every rank has posted its own.
func (c *localComm) begin(name string, p localPost) (*localCall, error) {
	o, err := c.post(name, p)
	if err != nil {
		return nil, err
	}
	return o, c.barrier(o, 0, false)
}

// rowsMismatch names two ranks that do not cut the same tensor alike.
func (c *localComm) rowsMismatch(o *localCall, name string, rows []int64, mine tensor.Tensor, j int,
	theirs tensor.Tensor) error {
	return c.mismatch(o, "%s: rank %d has rows %v of %v, rank %d has rows %v of %v", name, c.rank, rows, mine, j,
		o.posts[j].sendRows, theirs)
}

func (c *localComm) Split(color, key int) (Comm, error) {
	o, err := c.begin("comm.Split", localPost{a: color, b: key})
	if err != nil {
		return nil, err
	}
	g := c.g
	var made Comm
	if color >= 0 {
		var members []int
		for i := range o.posts {
			if o.posts[i].a == color {
				members = append(members, i)
			}
		}
		slices.SortStableFunc(members, func(x, y int) int { return cmp.Compare(o.posts[x].b, o.posts[y].b) })
		world := make([]int, len(members))
		for i, m := range members {
			world[i] = g.world[m]
		}
		g.mu.Lock()
		if o.groups == nil {
			o.groups = map[int]*localGroup{}
		}
		if o.groups[color] == nil {
			o.groups[color] = g.job.newGroup(world)
		}
		made = o.groups[color].newRank(slices.Index(members, c.rank))
		g.mu.Unlock()
	}
	if err := c.barrier(o, 1, true); err != nil {
		return nil, err
	}
	return made, nil
}

func (c *localComm) Barrier() error {
	o, err := c.post("comm.Barrier", localPost{})
	if err != nil {
		return err
	}
	return c.barrier(o, 0, true)
}

func (c *localComm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	const name = "comm.Broadcast"
	if err := cmp.Or(checkMemory(name, "tensor", t), checkRoot(root, c.Size()), waitFor(s)); err != nil {
		return err
	}
	o, err := c.begin(name, localPost{src: t, a: root})
	if err != nil {
		return err
	}
	from := &o.posts[root]
	for j := range o.posts {
		if p := &o.posts[j]; p.a != root || p.src.Bytes() != t.Bytes() {
			return c.mismatch(o, "%s: rank %d has %v and root %d, rank %d has %v and root %d", name, c.rank, t, root, j,
				p.src, p.a)
		}
	}
	copyBytes(t.Data, from.src.Data, t.Bytes())
	return c.barrier(o, 1, true)
}

// cutsAlike reports whether rank j cuts a tensor as rows does. Whole lists are compared with the
// next rank alone, so that a call is linear in the ranks: if lists differ, two neighbours find it.
// Of other ranks, the rows that this rank reads are compared.
func (c *localComm) cutsAlike(o *localCall, j int, rows []int64) bool {
	theirs := o.posts[j].sendRows
	if j == (c.rank+1)%len(rows) {
		return slices.Equal(theirs, rows)
	}
	return theirs[j] == rows[j]
}

func (c *localComm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	const name = "comm.AllGather"
	n := c.Size()
	if err := cmp.Or(checkShards(name, "dst", "src", dst, src, rows, c.rank, n), waitFor(s)); err != nil {
		return err
	}
	o, err := c.begin(name, localPost{dst: dst, src: src, sendRows: rows})
	if err != nil {
		return err
	}
	row, at := rowBytes(dst), before(rows, c.rank)
	for k := range n {
		j := (c.rank + k) % n // ranks start with different peers
		if j == 0 {
			at = 0
		}
		p := &o.posts[j]
		if !c.cutsAlike(o, j, rows) || rows[j] > 0 && rowBytes(p.src) != row {
			return c.rowsMismatch(o, name, rows, dst, j, p.dst)
		}
		copyBytes(blockAt(dst.Data, at*row, rows[j]*row), p.src.Data, rows[j]*row)
		at += rows[j]
	}
	return c.barrier(o, 1, true)
}

func (c *localComm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	const name = "comm.ReduceScatter"
	n := c.Size()
	if err := cmp.Or(checkShards(name, "src", "dst", src, dst, rows, c.rank, n), checkReduce(name, src, Sum),
		waitFor(s)); err != nil {
		return err
	}
	o, err := c.begin(name, localPost{dst: dst, src: src, sendRows: rows})
	if err != nil {
		return err
	}
	row, at := rowBytes(src), before(rows, c.rank)
	for j := range n {
		p := &o.posts[j]
		if !c.cutsAlike(o, j, rows) || p.src.DType != src.DType || rowBytes(p.src) != row ||
			p.src.Bytes() < (at+rows[c.rank])*row {
			return c.rowsMismatch(o, name, rows, src, j, p.src)
		}
		c.blocks[j] = blockAt(p.src.Data, at*row, rows[c.rank]*row)
	}
	if rows[c.rank]*row > 0 {
		reduce(Sum, src.DType, dst.Data, c.blocks, rows[c.rank]*row/src.DType.Size())
	}
	return c.barrier(o, 1, true)
}

func (c *localComm) AllReduce(s device.Stream, t tensor.Tensor, op Op) error {
	const name = "comm.AllReduce"
	if err := cmp.Or(checkReduce(name, t, op), waitFor(s)); err != nil {
		return err
	}
	o, err := c.begin(name, localPost{src: t, a: int(op)})
	if err != nil {
		return err
	}
	n, size := t.Numel(), c.Size()
	for j := range size {
		p := &o.posts[j]
		if p.src.DType != t.DType || p.src.Numel() != n || p.a != int(op) {
			return c.mismatch(o, "%s: rank %d has %v and reduction %d, rank %d has %v and reduction %d", name, c.rank,
				t, op, j, p.src, p.a)
		}
	}
	b := t.DType.Size()
	if t.Bytes()*int64(size) <= smallReduce {
		if c.scratch == nil {
			c.scratch = make([]byte, smallReduce)
		}
		out := unsafe.Pointer(unsafe.SliceData(c.scratch))
		c.reduceRange(o, op, t.DType, out, 0, n)
		// all ranks have read t: the result may replace it
		if err := c.barrier(o, 1, true); err != nil {
			return err
		}
		copyBytes(t.Data, out, n*b)
		return nil
	}
	lo, hi := Shard(n, size, c.rank)
	c.reduceRange(o, op, t.DType, blockAt(t.Data, lo*b, (hi-lo)*b), lo, hi)
	if err := c.barrier(o, 1, false); err != nil {
		return err
	}
	for k := 1; k < size; k++ {
		j := (c.rank + k) % size
		lo, hi := Shard(n, size, j)
		copyBytes(blockAt(t.Data, lo*b, (hi-lo)*b), blockAt(o.posts[j].src.Data, lo*b, (hi-lo)*b), (hi-lo)*b)
	}
	return c.barrier(o, 2, true)
}

// reduceRange combines elements [lo, hi) of the tensors of all ranks into dst.
func (c *localComm) reduceRange(o *localCall, op Op, dtype tensor.DType, dst unsafe.Pointer, lo, hi int64) {
	for j := range o.posts {
		c.blocks[j] = blockAt(o.posts[j].src.Data, lo*dtype.Size(), hi-lo)
	}
	if hi > lo {
		reduce(op, dtype, dst, c.blocks, hi-lo)
	}
}
