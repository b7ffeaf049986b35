package comm

import (
	"cmp"
	"sync/atomic"
	"time"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// TwoLevel is a communicator whose all-to-all has two levels. First, the ranks of a node collect at
// one of them what they send to the ranks with its position on other nodes. Then the ranks with one
// position exchange a message between each pair of nodes. All other calls go to the wrapped
// communicator.
//
// With N ranks on each of A nodes, a rank sends A-1 messages to other nodes, each N times as long
// as one of the ·N messages of a direct all-to-all. The nodes exchange the same number of
// bytes. Inside the nodes it moves more bytes (see TwoLevelTraffic), so it is faster only where the
// latency of many messages between nodes dominates: see Links.
//
// AllToAllStart leaves the work to a goroutine, which calls two communicators of its own.
// Therefore it makes progress while the caller computes, and requests may be waited for in any
// order. The goroutine uses a core while MPI waits for messages.
//
// Ranks do not need the counts of other ranks. Before the data, the ranks of a node tell each other
// their counts (8·A bytes a pair), and the wrapped communicator refuses messages of the wrong
// length. It does not detect counts that are wrong and have the right sum over a node.
type TwoLevel struct {
	Comm
	inside, between Comm // ranks of this node by position; ranks with this position by node
	ranks           [][]int
	node, position  int  // of this rank
	inOrder         bool // rank = node·N + position: received blocks have the order of dst

	queue   chan *twoLevelRequest
	pending int // requests that were started and not waited for
	spare   freeList[twoLevelRequest]
	closed  bool
	waited  time.Duration

	moved    [5]atomic.Int64 // see Moved
	told     []int64         // by position of a rank, then node: its counts, for this position
	tell     []int64         // the same, of this rank
	perRank  []int64         // scratch: one count for each rank of the node
	perRank2 []int64
	perNode  []int64
	perNode2 []int64
	packed   []byte // ordered for the next level
	received []byte
}

// Traffic is what a rank sends in all-to-alls, to ranks of its own node and of other nodes.
type Traffic struct {
	InsideBytes, BetweenBytes       int64
	InsideMessages, BetweenMessages int64 // messages without bytes are not sent and not counted
	CountBytes                      int64 // counts that precede the data, inside the node
}

// Nodes returns the node of each rank, numbered from 0 in rank order. Ranks with the same host name
// share a node. Collective.
func Nodes(c Comm) ([]int, error) {
	hosts, err := GatherBytes(c, []byte(hostName()))
	if err != nil {
		return nil, err
	}
	nodes, number := make([]int, len(hosts)), map[string]int{}
	for r, h := range hosts {
		if _, ok := number[string(h)]; !ok {
			number[string(h)] = len(number)
		}
		nodes[r] = number[string(h)]
	}
	return nodes, nil
}

// NewTwoLevel wraps a communicator for host memory. nodeOf[r] is the node of rank r (see Nodes).
// The values are equal on all ranks, and all nodes have the same number of ranks. If c is a
// Counted, its wrapped communicator is used; wrap the result in a Counted to count its calls. A
// Counted then counts the bytes of a direct all-to-all, and Moved has the bytes that were sent.
// Close also closes the wrapped communicator. Collective: all ranks return an error, or none.
func NewTwoLevel(c Comm, nodeOf []int) (*TwoLevel, error) {
	const name = "comm.NewTwoLevel"
	if k, ok := c.(*Counted); ok {
		c = k.inner
	}
	list := make([]int64, len(nodeOf))
	for r, n := range nodeOf {
		list[r] = int64(n)
	}
	if err := Same(c, name, List("nodeOf", list)); err != nil {
		return nil, err
	}
	if err := Agree(c, serves(name, c)); err != nil {
		return nil, err
	}
	ranks, err := byNode(name, nodeOf, c.Size())
	if err != nil {
		return nil, err
	}
	t := &TwoLevel{Comm: c, ranks: ranks, inOrder: true, queue: make(chan *twoLevelRequest, 64)}
	nodes, perNode := len(ranks), len(ranks[0])
	for a := range ranks {
		for i, r := range ranks[a] {
			if r == c.Rank() {
				t.node, t.position = a, i
			}
			t.inOrder = t.inOrder && r == a*perNode+i
		}
	}
	if t.inside, err = c.Split(t.node, t.position); err != nil {
		return nil, err
	}
	if t.between, err = c.Split(t.position, t.node); err != nil {
		return nil, err
	}
	t.told, t.tell = make([]int64, nodes*perNode), make([]int64, nodes*perNode)
	t.perRank, t.perRank2 = make([]int64, perNode), make([]int64, perNode)
	t.perNode, t.perNode2 = make([]int64, nodes), make([]int64, nodes)
	go t.serve()
	return t, nil
}

// serves returns an error if two goroutines cannot use communicators of the kind of c at once.
func serves(name string, c Comm) error {
	switch c.Kind() {
	case "local":
		return nil
	case "mpi":
		if _, _, level := mpiState(); level < threadMultiple {
			return status.Errorf(status.Unsupported,
				"%s: MPI was started with a thread level below MPI_THREAD_MULTIPLE; start it with that level, or use the direct all-to-all",
				name)
		}
		return nil
	}
	return status.Errorf(status.Unsupported,
		"%s: communicators of kind %q have no two-level all-to-all; use one of kind mpi or local", name, c.Kind())
}

// byNode returns the ranks of each node, in rank order. The nodes have the order of their first
// rank.
func byNode(name string, nodeOf []int, size int) ([][]int, error) {
	if len(nodeOf) != size {
		return nil, status.Errorf(status.InvalidArgument, "%s: %d nodes for %d ranks; give one node for each rank",
			name, len(nodeOf), size)
	}
	var ranks [][]int
	index := map[int]int{}
	for r, n := range nodeOf {
		a, ok := index[n]
		if !ok {
			a = len(ranks)
			index[n] = a
			ranks = append(ranks, nil)
		}
		ranks[a] = append(ranks[a], r)
	}
	for a := range ranks {
		if len(ranks[a]) != len(ranks[0]) {
			return nil, status.Errorf(status.Unsupported,
				"%s: the node of rank %d has %d ranks, the node of rank %d has %d; start the same number on each node, or use the direct all-to-all",
				name, ranks[a][0], len(ranks[a]), ranks[0][0], len(ranks[0]))
		}
	}
	return ranks, nil
}

// Inner returns the wrapped communicator.
func (t *TwoLevel) Inner() Comm { return t.Comm }

// Moved returns what this rank has sent in all-to-alls so far. It may be called at any time.
func (t *TwoLevel) Moved() Traffic {
	return Traffic{InsideBytes: t.moved[0].Load(), BetweenBytes: t.moved[1].Load(), InsideMessages: t.moved[2].Load(),
		BetweenMessages: t.moved[3].Load(), CountBytes: t.moved[4].Load()}
}

// Waited returns the time in which calls of this rank have waited for other ranks. In the Wait of a
// request, this is the time for which its two levels have waited, and at most the time in Wait.
func (t *TwoLevel) Waited() time.Duration {
	if w, ok := t.Comm.(Waiter); ok {
		return t.waited + w.Waited()
	}
	return t.waited
}

// Close ends the goroutine and closes the communicators. Collective.
func (t *TwoLevel) Close() error {
	if t.closed {
		return nil
	}
	t.closed = true
	close(t.queue)
	return cmp.Or(t.inside.Close(), t.between.Close(), t.Comm.Close())
}

// twoLevelRequest is an all-to-all in bytes.
type twoLevelRequest struct {
	t          *TwoLevel
	dst, src   unsafe.Pointer
	recv, send []int64       // bytes, by rank
	waited     time.Duration // for other ranks, in both levels
	done       chan error
	active     bool // Wait was not called yet
	ended      bool // err is the result
	err        error
}

func (t *TwoLevel) serve() {
	for r := range t.queue {
		r.done <- t.exchange(r)
	}
}

// request returns a request for checked arguments.
func (t *TwoLevel) request(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (*twoLevelRequest, error) {
	const name = "comm.AllToAll"
	if t.closed {
		return nil, errClosed(name)
	}
	if err := cmp.Or(checkAllToAll(dst, src, recvRows, sendRows, t.Size()), waitFor(s)); err != nil {
		return nil, err
	}
	own := t.Rank()
	if err := CheckOwnBlock(name, own, sendRows[own]*rowBytes(src), recvRows[own]*rowBytes(dst)); err != nil {
		return nil, err
	}
	r := t.spare.get()
	if r.t == nil {
		r.t, r.done = t, make(chan error, 1)
		r.recv, r.send = make([]int64, t.Size()), make([]int64, t.Size())
	}
	r.dst, r.src, r.ended, r.err = dst.Data, src.Data, false, nil
	for j := range r.recv {
		r.recv[j], r.send[j] = recvRows[j]*rowBytes(dst), sendRows[j]*rowBytes(src)
	}
	return r, nil
}

func (t *TwoLevel) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	if t.pending > 0 { // behind the requests in progress
		q, err := t.AllToAllStart(s, dst, src, recvRows, sendRows)
		if err != nil {
			return err
		}
		return q.Wait()
	}
	r, err := t.request(s, dst, src, recvRows, sendRows)
	if err != nil {
		return err
	}
	err = t.exchange(r)
	t.waited += r.waited
	t.release(r)
	return err
}

// AllToAllStart starts an all-to-all. The levels of all requests run in the order of their starts.
func (t *TwoLevel) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	r, err := t.request(s, dst, src, recvRows, sendRows)
	if err != nil {
		return nil, err
	}
	r.active = true
	t.pending++
	t.queue <- r
	return r, nil
}

// release makes a request reusable.
func (t *TwoLevel) release(r *twoLevelRequest) {
	r.dst, r.src = nil, nil
	t.spare.put(r)
}

// Wait waits until the all-to-all is complete on this rank.
func (r *twoLevelRequest) Wait() error {
	if !r.active {
		return ErrWaited()
	}
	began := time.Now()
	if !r.ended {
		r.err = <-r.done
	}
	t, err := r.t, r.err
	t.waited += min(r.waited, time.Since(began))
	r.active = false
	t.pending--
	t.release(r)
	return err
}

// Test reports whether Wait would return at once.
func (r *twoLevelRequest) Test() (bool, error) {
	if r.active && !r.ended {
		select {
		case r.err = <-r.done:
			r.ended = true
		default:
			return false, nil
		}
	}
	return true, r.err
}

// exchange runs both levels of a request.
func (t *TwoLevel) exchange(r *twoLevelRequest) error {
	began := waitedOf(t.inside) + waitedOf(t.between)
	nodes, perNode := len(t.ranks), len(t.ranks[0])
	if err := t.tellCounts(r); err != nil {
		return err
	}
	// Level 1: to each position on this node, what goes to this position on all nodes.
	at := int64(0)
	packed := resize(&t.packed, total(r.send))
	for i := range perNode {
		t.perRank[i], t.perRank2[i] = 0, total(t.told[i*nodes:(i+1)*nodes])
		for b := range nodes {
			rank := t.ranks[b][i]
			n := r.send[rank]
			copyBytes(blockAt(pointer(packed), at, n), blockAt(r.src, before(r.send, rank), n), n)
			t.perRank[i] += n
			at += n
		}
	}
	received := resize(&t.received, total(t.perRank2))
	if err := t.inside.AllToAll(nil, bytesOf(received), bytesOf(packed), t.perRank2, t.perRank); err != nil {
		return err
	}
	t.count(0, t.perRank, t.position)
	// Level 2: to this position on each node, what the ranks of this node send there.
	at = 0
	packed = resize(&t.packed, total(t.told))
	for b := range nodes {
		t.perNode[b], t.perNode2[b] = 0, 0
		for i := range perNode {
			k := i*nodes + b
			n := t.told[k]
			copy(packed[at:at+n], received[before(t.told, k):])
			t.perNode[b] += n
			t.perNode2[b] += r.recv[t.ranks[b][i]]
			at += n
		}
	}
	out := memory(r.dst, total(r.recv))
	if !t.inOrder {
		out = resize(&t.received, total(r.recv))
	}
	if err := t.between.AllToAll(nil, bytesOf(out), bytesOf(packed), t.perNode2, t.perNode); err != nil {
		return err
	}
	t.count(1, t.perNode, t.node)
	if !t.inOrder {
		at = 0
		for b := range nodes {
			for _, rank := range t.ranks[b] {
				n := r.recv[rank]
				copyBytes(blockAt(r.dst, before(r.recv, rank), n), blockAt(pointer(out), at, n), n)
				at += n
			}
		}
	}
	r.waited = waitedOf(t.inside) + waitedOf(t.between) - began
	return nil
}

// tellCounts sets told: the bytes that each rank of this node sends to this position on each node.
func (t *TwoLevel) tellCounts(r *twoLevelRequest) error {
	nodes, perNode := len(t.ranks), len(t.ranks[0])
	for i := range perNode {
		for b := range nodes {
			t.tell[i*nodes+b] = r.send[t.ranks[b][i]]
		}
		t.perRank[i] = int64(nodes)
	}
	t.moved[4].Add(int64(8 * nodes * (perNode - 1)))
	return t.inside.AllToAll(nil, int64s(t.told), int64s(t.tell), t.perRank, t.perRank)
}

// count adds the messages of a level to moved.
func (t *TwoLevel) count(level int, bytes []int64, own int) {
	for j, n := range bytes {
		if j != own && n > 0 {
			t.moved[level].Add(n)
			t.moved[2+level].Add(1)
		}
	}
}

// waitedOf returns the waiting time of a communicator, and 0 if it does not measure it.
func waitedOf(c Comm) time.Duration {
	if w, ok := c.(Waiter); ok {
		return w.Waited()
	}
	return 0
}
