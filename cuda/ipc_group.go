package cuda

import (
	"sync"
	"time"
)

// group is the state that the ranks of a communicator share if they are goroutines of one process.
// They read each other's memory at plain addresses, so a rank must not free its memory while
// another rank may read it, also after the job has failed. Ranks in different processes do not need
// a group: a process that fails ends without freeing memory, because CUDA does not define the
// effect of freeing memory that another process maps.
type group struct {
	name    string
	mu      sync.Mutex
	changed sync.Cond
	inCall  int // ranks in a call
	users   int
	failed  bool // the host's communicator has failed, for all ranks
}

var groups = struct {
	sync.Mutex
	by map[string]*group
}{by: map[string]*group{}}

// joinGroup returns the group with this name. The first rank makes it.
func joinGroup(name string) *group {
	groups.Lock()
	defer groups.Unlock()
	g := groups.by[name]
	if g == nil {
		g = &group{name: name}
		g.changed.L = &g.mu
		groups.by[name] = g
	}
	g.users++
	return g
}

// release ends the use of the group by one rank.
func (g *group) release() {
	groups.Lock()
	defer groups.Unlock()
	if g.users--; g.users == 0 {
		delete(groups.by, g.name)
	}
}

// shared reports whether several ranks are in this process.
func (g *group) shared() bool {
	groups.Lock()
	defer groups.Unlock()
	return g.users > 1
}

func (g *group) enter() {
	g.mu.Lock()
	g.inCall++
	g.mu.Unlock()
}

// hostFailed records that the host's communicator has failed, and returns erg.
func (g *group) hostFailed(err error) error {
	g.mu.Lock()
	g.failed = true
	g.mu.Unlock()
	return err
}

// leaveTimeout limits the time that a failing rank waits for the other ranks to fail.
const leaveTimeout = 5 * time.Second

// leave ends a call. After a failure of the host's communicator, which fails all ranks, it waits
// until all other ranks have left their calls.
func (g *group) leave(failed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inCall--
	g.changed.Broadcast()
	if !failed || !g.failed {
		return
	}
	late := false
	timer := time.AfterFunc(leaveTimeout, func() {
		g.mu.Lock()
		late = true
		g.changed.Broadcast()
		g.mu.Unlock()
	})
	defer timer.Stop()
	for g.inCall > 0 && !late {
		g.changed.Wait()
	}
}
