package dryrun

import (
	"math/bits"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Comm is the communicator of one rank in a group whose other ranks are assumed to hold the same
// values: comparisons succeed, AllGather returns this rank's rows for every rank, and AllReduce
// leaves this rank's values unchanged. Only time and traffic are counted.
type Comm struct {
	d       *Device
	members []int  // world ranks of the group, in the group's order
	rank    int    // of this rank in the group
	levels  [2]int // nodes and ranks of a node, if all-to-alls have two levels
	queue   int    // of the links of a rank: 1 on the sequence axis, else 0
}

// NewMesh returns the mesh that comm.NewMesh and DivideExperts make on a rank of a world of size
// ranks. ulysses is the number of ranks that share a sequence; it must divide size, and so must
// experts. The communicators record their traffic in l and their time in c.
func NewMesh(d *Device, rank, size, ulysses, ring, experts int, l *comm.Ledger, c *clock.Clock) *comm.Mesh {
	p := ulysses * ring
	m := &comm.Mesh{Ulysses: ulysses, Ring: ring, Replica: rank / p, Replicas: size / p}
	counted := func(axis string, first, step, n, rank int) *comm.Counted {
		x := &Comm{d: d, members: make([]int, n), rank: rank}
		for i := range x.members {
			x.members[i] = first + i*step
		}
		return comm.NewCounted(x, axis, l, c, nil)
	}
	m.World = counted("world", 0, 1, size, rank)
	m.Seq = counted("sequence", m.Replica*p, 1, p, rank%p)
	m.Seq.Inner().(*Comm).queue = 1
	m.Data = counted("data", rank%p, p, m.Replicas, m.Replica)
	if experts > 1 {
		m.Expert = counted("expert", rank/experts*experts, 1, experts, rank%experts)
		m.ExpertData = counted("expert data", rank%experts, experts, size/experts, rank/experts)
	}
	for i := range p {
		m.Nodes = append(m.Nodes, (m.Replica*p+i)/d.rates.PerNode)
	}
	return m
}

func (c *Comm) Rank() int    { return c.rank }
func (c *Comm) Size() int    { return len(c.members) }
func (c *Comm) Kind() string { return "dryrun" }
func (c *Comm) Close() error { return nil }

func (c *Comm) Abort(status.Code, string) {}

// Split returns an error, because the colors of the other ranks are not known.
func (c *Comm) Split(int, int) (comm.Comm, error) {
	return nil, status.Errorf(status.Unsupported,
		"dryrun.Split: a dry run has one rank, so the groups are unknown; use NewMesh")
}

func (c *Comm) node(rank int) int { return c.members[rank] / c.d.rates.PerNode }

// nodes returns how many ranks of the group are on this rank's node, and whether some are on other
// nodes.
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

// traffic is the number of bytes between this rank and ranks of its node, and of other nodes, and
// the number of messages to or from other nodes.
type traffic struct{ node, network, messages int64 }

// add counts bytes to or from a rank of the group. Bytes to this rank itself, or to no rank (below
// 0), do not count.
func (t *traffic) add(c *Comm, rank int, bytes int64) {
	switch {
	case rank < 0 || rank == c.rank:
	case c.node(rank) == c.node(c.rank):
		t.node += bytes
	default:
		t.network += bytes
		if bytes > 0 {
			t.messages++
		}
	}
}

// communicate charges one communication to a stream, or to the host if s is nil. Both links work at
// the same time, in both directions: the time is that of the slowest. The latency grows with the
// logarithm of the number of ranks. Communications of streams queue for the links that they use, in
// the order of the calls; the sequence axis has a queue of its own (link). Only their traffic is
// added to the account.
func (c *Comm) communicate(s device.Stream, sent, received traffic) error {
	if c.Size() == 1 {
		return nil
	}
	c.d.spent.Waits[c.d.clock.Current()]++ // every communication waits for other ranks
	r := &c.d.rates
	node, network := float64(max(sent.node, received.node))/r.Node,
		float64(max(sent.network, received.network))/r.Network
	network += float64(max(sent.messages, received.messages)) * r.Message
	seconds := max(r.Latency*float64(bits.Len(uint(c.Size()-1))), node, network)
	if s == nil {
		return c.d.charge(s, seconds)
	}
	c.d.spent.Node += sent.node
	c.d.spent.Network += sent.network
	if x, ok := s.(*stream); ok {
		x.transfer(c.queue, node, network)
	}
	return c.d.charge(s, seconds)
}

// ring charges a ring algorithm over the group in which each rank sends and receives bytes. Ranks
// of a node share the traffic between nodes, because each of them has a link.
func (c *Comm) ring(s device.Stream, bytes int64) error {
	here, others := c.nodes()
	by := traffic{node: bytes}
	if others {
		by.network = bytes / int64(here)
		if by.node -= by.network; here == 1 {
			by.node = 0
		}
	}
	return c.communicate(s, by, by)
}

func (c *Comm) Barrier() error { return c.communicate(nil, traffic{}, traffic{}) }

func (c *Comm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	var sent, received traffic
	for r := range sendRows {
		sent.add(c, r, sendRows[r]*comm.RowBytes(src))
		received.add(c, r, recvRows[r]*comm.RowBytes(dst))
	}
	if c.levels[0] > 0 {
		return c.twoLevels(s, sent.node+sent.network)
	}
	return c.communicate(s, sent, received)
}

// ServesTwoLevels reports whether a run on this kind of device can have two levels.
func (c *Comm) ServesTwoLevels() bool { return c.d.Info().Place == tensor.Host }

// ModelTwoLevels gives all-to-alls the time and the traffic of two levels (comm.TwoLevel).
func (c *Comm) ModelTwoLevels(nodes, perNode int) { c.levels = [2]int{nodes, perNode} }

// twoLevels charges an all-to-all in which this rank sends bytes to others, in equal blocks. One
// level follows the other, and bytes are copied twice more.
func (c *Comm) twoLevels(s device.Stream, bytes int64) error {
	a, n, r := int64(c.levels[0]), int64(c.levels[1]), &c.d.rates
	all := bytes * (a * n) / (a*n - 1) // with the own block
	by := traffic{node: all * (n - 1) / n, network: all * (a - 1) / a}
	_, seconds := r.Links().AllToAllSeconds(int(a), int(n), all)
	c.d.spent.Waits[c.d.clock.Current()]++
	if s != nil {
		c.d.spent.Node += by.node
		c.d.spent.Network += by.network
		if x, ok := s.(*stream); ok {
			x.transfer(c.queue, seconds, seconds)
		}
	}
	return c.d.charge(s, seconds)
}

// request is a started all-to-all, which ends at a time of the host's clock.
type request struct {
	s  *stream // nil: it has ended
	at float64
}

// Wait makes the stream wait for the all-to-all.
func (r request) Wait() error {
	if r.s != nil {
		r.s.at = max(r.s.at, r.at)
	}
	return nil
}

// AllToAllStart starts an all-to-all after the operations of its stream so far. On a device whose
// operations are asynchronous, later operations of the stream overlap with it. On a CPU, the call
// takes the time of the whole all-to-all: the processor moves the bytes.
func (c *Comm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (comm.Request, error) {
	x, ok := s.(*stream)
	if c.Size() == 1 || !ok || x.d != c.d || !c.d.asynchronous() {
		return request{}, c.AllToAll(s, dst, src, recvRows, sendRows)
	}
	started := *x
	if err := c.AllToAll(&started, dst, src, recvRows, sendRows); err != nil {
		return nil, err
	}
	return request{x, started.at}, nil
}

func (c *Comm) AllReduce(s device.Stream, t tensor.Tensor, _ comm.Op) error {
	return c.ring(s, comm.AllReduceBytes(c.rank, c.Size(), t.Numel(), t.DType.Size()))
}

// AllGather charges the communication. For tensors in host memory it also copies this rank's rows
// to the block of every rank that has as many rows; other blocks keep their content.
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
	return c.ring(s, comm.AllGatherBytes(c.rank, rows, comm.RowBytes(dst)))
}

func (c *Comm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	return c.ring(s, comm.ReduceScatterBytes(c.rank, rows, comm.RowBytes(src)))
}

func (c *Comm) Broadcast(s device.Stream, t tensor.Tensor, _ int) error { return c.ring(s, t.Bytes()) }

func (c *Comm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	var sent, received traffic
	sent.add(c, to, send.Bytes())
	received.add(c, from, recv.Bytes())
	return c.communicate(s, sent, received)
}

var _ comm.Comm = (*Comm)(nil)
