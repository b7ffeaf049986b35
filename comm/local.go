package comm

import (
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// localJob is the state that all communicators of one Local share.
type localJob struct {
	failure atomic.Pointer[status.Error] // why the job has ended; nil while it runs
	ended   []atomic.Bool                // by world rank: its function has returned
	now     func() time.Time             // time.Now, except in tests
	mu      sync.Mutex
	groups  []*localGroup // all that are not closed
}

// localGroup is the state that all ranks of one communicator share, under one lock and one
// condition variable. Bytes are copied outside the lock, from the sender's memory directly to the
// receiver's.
type localGroup struct {
	job   *localJob
	world []int // by rank: its world rank
	mu    sync.Mutex
	cond  *sync.Cond
	calls map[int64]*localCall // collectives in progress, by sequence number
	spare freeList[localCall]
	queue [][]*localMessage // by from*size+to: messages of SendRecv, in order of sending
	open  int               // ranks that have not closed the communicator
}

// localComm is the communicator of one rank of a localGroup.
type localComm struct {
	g       *localGroup
	rank    int
	seq     int64 // of this rank's next collective
	closed  bool
	waited  time.Duration // see Waiter
	scratch []byte
	blocks  []unsafe.Pointer // by rank, for reduce
	message localMessage     // the one that this rank sends
	spare   freeList[localRequest]
}

// localPost has the arguments that a rank posts to a collective.
type localPost struct {
	posted, waiting    bool // waiting: the rank is in Wait
	dst, src           tensor.Tensor
	recvRows, sendRows []int64
	a, b               int // root, or reduction, or color and key
}

// localCall is a collective in progress.
type localCall struct {
	seq     int64
	name    string
	posts   []localPost // by rank
	posted  int         // ranks that have posted their arguments
	allAt   time.Time   // when the last rank posted its arguments
	arrived [3]int      // by barrier of the call: ranks that have arrived
	working int         // ranks between two barriers, which may be in the memory of others
	done    int         // ranks that have left the call
	groups  map[int]*localGroup
	copies  localCopies
}

// localCopies is the state of the copies of an all-to-all.
type localCopies struct {
	claimed  []bool // by receiver*size+sender: the copy has begun
	busy     []int  // by rank: copies in progress that use its memory
	received []int  // by rank: blocks that have been written to its dst
	sent     []int  // by rank: blocks that have been read from its src
}

func newLocalCopies(n int) localCopies {
	return localCopies{claimed: make([]bool, n*n), busy: make([]int, n), received: make([]int, n), sent: make([]int, n)}
}

func (p *localCopies) reset() {
	clear(p.claimed)
	clear(p.busy)
	clear(p.received)
	clear(p.sent)
}

type localRequest struct {
	c *localComm
	o *localCall // nil after Wait
}

// localMessage is a tensor that is sent. The receiver copies it from the sender's memory.
type localMessage struct {
	t          tensor.Tensor
	busy, done bool      // the copy is in progress, is complete
	takenAt    time.Time // when the receiver began the copy
}

// Local returns the communicators of n goroutine ranks of one process, by rank. Each communicator
// serves one goroutine at a time. They need no Close if no Split was made.
func Local(n int) []Comm {
	job := &localJob{ended: make([]atomic.Bool, n), now: time.Now}
	world := make([]int, n)
	for i := range world {
		world[i] = i
	}
	g := job.newGroup(world)
	ranks := make([]Comm, n)
	for i := range ranks {
		ranks[i] = g.newRank(i)
	}
	return ranks
}

// RunLocal runs f as n ranks, one goroutine each, and waits for all of them. The first error ends
// the job: calls of the other ranks fail, and RunLocal returns that error with the number of its
// rank. A panic becomes an error with the code Internal. A rank that returns while another rank
// waits for it also ends the job.
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
			defer func() { // also after runtime.Goexit in f
				if !returned {
					err = exitError(recover())
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

// exitError returns the error of a rank whose function did not return.
func exitError(panicked any) error {
	if panicked == nil {
		return status.Errorf(status.Internal, "the goroutine of the rank ended without returning (runtime.Goexit)")
	}
	return status.Errorf(status.Internal, "panic: %v\n%s", panicked, debug.Stack())
}

func (j *localJob) newGroup(world []int) *localGroup {
	g := &localGroup{job: j, world: world, calls: map[int64]*localCall{},
		queue: make([][]*localMessage, len(world)*len(world)), open: len(world)}
	g.cond = sync.NewCond(&g.mu)
	j.mu.Lock()
	j.groups = append(j.groups, g)
	j.mu.Unlock()
	return g
}

// fail ends the job and wakes all ranks; only the first call has an effect. The caller must not
// hold the lock of a group.
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

func (g *localGroup) newRank(i int) *localComm {
	return &localComm{g: g, rank: i, blocks: make([]unsafe.Pointer, len(g.world))}
}

func (c *localComm) Rank() int    { return c.rank }
func (c *localComm) Size() int    { return len(c.g.world) }
func (c *localComm) Kind() string { return "local" }

// Waited returns the time in which the calls of this rank have waited for others: until the last
// rank has posted its arguments, or until the other rank of a message is there.
func (c *localComm) Waited() time.Duration { return c.waited }

// addWaiting adds the time from the start of a wait until the other ranks had arrived.
func (c *localComm) addWaiting(began, arrived time.Time) {
	c.waited += max(0, arrived.Sub(began))
}

func (c *localComm) Abort(code status.Code, reason string) {
	c.g.job.fail(fmt.Errorf("rank %d ended the job (%v): %s", c.g.world[c.rank], code, reason))
}

// Close releases the communicator. It is not collective.
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
