package comm

import (
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// localJob is what all communicators of one Local share: its end.
type localJob struct {
	failure atomic.Pointer[status.Error]
	ended   []atomic.Bool // by world rank: its function has returned
	mu      sync.Mutex
	groups  []*localGroup
}

// localGroup is one communicator seen from all its ranks. Ranks meet under one lock and wait on one
// condition; memory is copied outside the lock, straight from the sender's to the receiver's.
type localGroup struct {
	job   *localJob
	world []int // world rank by rank
	mu    sync.Mutex
	cond  *sync.Cond
	calls map[int64]*localCall // collectives under way, by sequence number
	spare []*localCall
	wires [][]*localMessage // point to point, by from*size+to, in order of sending
	open  int               // ranks that have not closed it
}

// localComm is one rank's face of a localGroup.
type localComm struct {
	g       *localGroup
	rank    int
	seq     int64
	closed  bool
	scratch []byte
	parts   []unsafe.Pointer // by rank, for reduce
	message localMessage
	spare   []*localRequest
}

// localPost is what a rank brings to a collective.
type localPost struct {
	here, waiting      bool
	dst, src           tensor.Tensor
	recvRows, sendRows []int64
	a, b               int // root, or reduction, or color and key
}

// localCall is one collective under way.
type localCall struct {
	seq     int64
	name    string
	posts   []localPost
	met     [3]int // ranks that reached each meeting
	working int    // ranks that may be in others' memory, between two meetings
	done    int    // ranks that have left
	groups  map[int]*localGroup
	pairs   localPairs
}

// localPairs is the state of those copies.
type localPairs struct {
	claimed []bool // by receiver*size+sender
	busy    []int  // by rank: copies under way in its memory
	pulled  []int  // by rank: blocks that have arrived
	taken   []int  // by rank: blocks that have been read
}

func newLocalPairs(n int) localPairs {
	return localPairs{claimed: make([]bool, n*n), busy: make([]int, n), pulled: make([]int, n), taken: make([]int, n)}
}

func (p *localPairs) reset() {
	clear(p.claimed)
	clear(p.busy)
	clear(p.pulled)
	clear(p.taken)
}

type localRequest struct {
	c *localComm
	o *localCall // nil once waited for
}

// localMessage is a tensor on its way; the receiver copies it out of the sender's memory.
type localMessage struct {
	t          tensor.Tensor
	busy, done bool
}

// Local makes n goroutine ranks of one process: element i is rank i's. Each communicator serves one
// goroutine at a time.
func Local(n int) []Comm {
	job := &localJob{ended: make([]atomic.Bool, n)}
	world := make([]int, n)
	for i := range world {
		world[i] = i
	}
	g := job.group(world)
	ranks := make([]Comm, n)
	for i := range ranks {
		ranks[i] = g.rank(i)
	}
	return ranks
}

// RunLocal runs f as n ranks, one goroutine each, and waits for all. The first error ends the job:
// the others' calls fail. It returns that error with its rank; a panic becomes an Internal one. A
// rank that returns while another waits for it ends the job too.
func RunLocal(n int, f func(Comm) error) error {
	ranks := Local(n)
	job := ranks[0].(*localComm).g.job
	var first error
	var once sync.Once
	var wg sync.WaitGroup
	for i, c := range ranks {
		wg.Add(1)
		go func() {
			defer wg.Done()
			returned, err := false, error(nil)
			defer func() { // also when the goroutine is ended under f
				if !returned {
					err = unreturned(recover())
				}
				if err != nil {
					once.Do(func() {
						first = &status.Error{Code: status.Of(err), Text: fmt.Sprintf("rank %d: %v", i, err), Err: err}
					})
					c.Abort(status.Of(err), err.Error())
				}
				job.end(i)
			}()
			err = f(c)
			returned = true
		}()
	}
	wg.Wait()
	return first
}

func unreturned(panicked any) error {
	if panicked == nil {
		return status.Errorf(status.Internal, "the rank's goroutine was ended (runtime.Goexit)")
	}
	return status.Errorf(status.Internal, "panic: %v\n%s", panicked, debug.Stack())
}

func (j *localJob) group(world []int) *localGroup {
	g := &localGroup{job: j, world: world, calls: map[int64]*localCall{}, wires: make([][]*localMessage, len(world)*len(world)), open: len(world)}
	g.cond = sync.NewCond(&g.mu)
	j.mu.Lock()
	j.groups = append(j.groups, g)
	j.mu.Unlock()
	return g
}

// fail ends the job, once, and wakes everyone. No group's lock may be held.
func (j *localJob) fail(err error) {
	e := &status.Error{Code: status.Comm, Text: err.Error(), Err: err}
	if j.failure.CompareAndSwap(nil, e) {
		j.wake()
	}
}

func (j *localJob) end(rank int) {
	j.ended[rank].Store(true)
	j.wake()
}

func (j *localJob) wake() {
	j.mu.Lock()
	groups := slices.Clone(j.groups)
	j.mu.Unlock()
	for _, g := range groups {
		g.mu.Lock()
		g.cond.Broadcast()
		g.mu.Unlock()
	}
}

func (j *localJob) err() error {
	if e := j.failure.Load(); e != nil {
		return e
	}
	return nil
}

func (g *localGroup) rank(i int) *localComm {
	return &localComm{g: g, rank: i, parts: make([]unsafe.Pointer, len(g.world))}
}

func (c *localComm) Rank() int    { return c.rank }
func (c *localComm) Size() int    { return len(c.g.world) }
func (c *localComm) Kind() string { return "local" }

func (c *localComm) Abort(code status.Code, reason string) {
	c.g.job.fail(fmt.Errorf("rank %d ended the job (%v): %s", c.g.world[c.rank], code, reason))
}

// Close gives the communicator up; it is not collective.
func (c *localComm) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	c.g.mu.Lock()
	c.g.open--
	last := c.g.open == 0
	c.g.mu.Unlock()
	if last {
		j := c.g.job
		j.mu.Lock()
		j.groups = slices.DeleteFunc(j.groups, func(g *localGroup) bool { return g == c.g })
		j.mu.Unlock()
	}
	return nil
}
