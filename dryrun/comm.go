package dryrun

import (
	"math/bits"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Comm is one rank's view of a group in which everybody else does and says the same: what ranks
// compare is the same, what they gather is this rank's own over again, maxima are its own.
type Comm struct {
	d       *Device
	members []int // ranks of the world
	rank    int
}

// NewMesh is comm.NewMesh for rank of size ranks, ulysses to a sequence, of which size is a
// multiple.
func NewMesh(d *Device, rank, size, ulysses int, l *comm.Ledger, c *clock.Clock) *comm.Mesh {
	m := &comm.Mesh{Ulysses: ulysses, Ring: 1, Replica: rank / ulysses, Replicas: size / ulysses}
	counted := func(axis string, first, step, n, rank int) *comm.Counted {
		x := &Comm{d: d, members: make([]int, n), rank: rank}
		for i := range x.members {
			x.members[i] = first + i*step
		}
		return comm.NewCounted(x, axis, l, c, nil)
	}
	m.World = counted("world", 0, 1, size, rank)
	m.Seq = counted("sequence", m.Replica*ulysses, 1, ulysses, rank%ulysses)
	m.Data = counted("data", rank%ulysses, ulysses, m.Replicas, m.Replica)
	return m
}

func (c *Comm) Rank() int    { return c.rank }
func (c *Comm) Size() int    { return len(c.members) }
func (c *Comm) Kind() string { return "dryrun" }
func (c *Comm) Close() error { return nil }

func (c *Comm) Abort(status.Code, string) {}

// Split is refused: who else has this color nobody knows here.
func (c *Comm) Split(int, int) (comm.Comm, error) {
	return nil, status.Errorf(status.Unsupported, "dryrun.Split: make the groups with NewMesh")
}

func (c *Comm) node(rank int) int { return c.members[rank] / c.d.rates.PerNode }

// nodes is how many ranks of the group are on this one's node, and whether there are others.
func (c *Comm) nodes() (here int, others bool) {
	for r := range c.members {
		if c.node(r) == c.node(c.rank) {
			here++
		} else {
			others = true
		}
	}
	return here, others
}

// traffic is bytes between this rank and others: of its node, and of other nodes.
type traffic struct{ node, network int64 }

// add counts what is exchanged with a rank.
func (t *traffic) add(c *Comm, rank int, bytes int64) {
	switch {
	case rank < 0 || rank == c.rank:
	case c.node(rank) == c.node(c.rank):
		t.node += bytes
	default:
		t.network += bytes
	}
}

// exchange takes as long as the busiest direction of both links, which work side by side.
func (c *Comm) exchange(s device.Stream, sent, received traffic) error {
	if c.Size() == 1 {
		return nil
	}
	c.d.spent.Meetings[c.d.clock.Current()]++
	if s != nil {
		c.d.spent.Node += sent.node
		c.d.spent.Network += sent.network
	}
	r := &c.d.rates
	node, network := float64(max(sent.node, received.node)), float64(max(sent.network, received.network))
	return c.d.take(s, max(r.Latency*float64(bits.Len(uint(c.Size()-1))), node/r.Node, network/r.Network))
}

// along is what a ring over the group takes that passes so many bytes by each rank: between nodes
// it has the links of all ranks on a node.
func (c *Comm) along(s device.Stream, bytes int64) error {
	here, others := c.nodes()
	by := traffic{node: bytes}
	if others {
		by.network = bytes / int64(here)
		if by.node -= by.network; here == 1 {
			by.node = 0
		}
	}
	return c.exchange(s, by, by)
}

func (c *Comm) Barrier() error { return c.exchange(nil, traffic{}, traffic{}) }

func (c *Comm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	var sent, received traffic
	for r := range sendRows {
		sent.add(c, r, sendRows[r]*comm.RowBytes(src))
		received.add(c, r, recvRows[r]*comm.RowBytes(dst))
	}
	return c.exchange(s, sent, received)
}

type done struct{}

func (done) Wait() error { return nil }

// AllToAllStart is not hidden behind anything: what hides it is on other streams.
func (c *Comm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	return done{}, c.AllToAll(s, dst, src, recvRows, sendRows)
}

func (c *Comm) AllReduce(s device.Stream, t tensor.Tensor, _ comm.Op) error {
	return c.along(s, comm.AllReduceBytes(c.rank, c.Size(), t.Numel(), t.DType.Size()))
}

// AllGather of the host's tensors repeats this rank's rows where others have as many.
func (c *Comm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	if s == nil && dst.Where == tensor.Host {
		n, at := rows[c.rank]*comm.RowBytes(dst), int64(0)
		for r := range rows {
			if rows[r] == rows[c.rank] && n > 0 {
				copy(dst.RawBytes()[at:at+n], src.RawBytes()[:n])
			}
			at += rows[r] * comm.RowBytes(dst)
		}
	}
	return c.along(s, comm.AllGatherBytes(c.rank, rows, comm.RowBytes(dst)))
}

func (c *Comm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	return c.along(s, comm.ReduceScatterBytes(c.rank, rows, comm.RowBytes(src)))
}

func (c *Comm) Broadcast(s device.Stream, t tensor.Tensor, _ int) error { return c.along(s, t.Bytes()) }

func (c *Comm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	var sent, received traffic
	sent.add(c, to, send.Bytes())
	received.add(c, from, recv.Bytes())
	return c.exchange(s, sent, received)
}

var _ comm.Comm = (*Comm)(nil)
