package cuda

import (
	"sync"
	"time"
)

// room is what the ranks of a communicator that are goroutines of one process share, whose memory
// is reached by plain addresses: a rank must not give its memory back while another may still come
// to read it, also when the job has failed. Processes need none: one that fails alone ends with its
// memory as it is, because CUDA does not say what becomes of memory that is freed while another
// process maps it.
type room struct {
	name     string
	mu       sync.Mutex
	changed  sync.Cond
	inside   int // ranks in a call
	users    int
	deserted bool // the host's communicator has failed, and fails for all
}

var rooms = struct {
	sync.Mutex
	by map[string]*room
}{by: map[string]*room{}}

func roomOf(name string) *room {
	rooms.Lock()
	defer rooms.Unlock()
	r := rooms.by[name]
	if r == nil {
		r = &room{name: name}
		r.changed.L = &r.mu
		rooms.by[name] = r
	}
	r.users++
	return r
}

// give ends one rank's use.
func (r *room) give() {
	rooms.Lock()
	defer rooms.Unlock()
	if r.users--; r.users == 0 {
		delete(rooms.by, r.name)
	}
}

func (r *room) here() bool { return r.users > 1 }

func (r *room) enter() {
	r.mu.Lock()
	r.inside++
	r.mu.Unlock()
}

// lost notes that the host's communicator has failed.
func (r *room) lost(err error) error {
	r.mu.Lock()
	r.deserted = true
	r.mu.Unlock()
	return err
}

// patience is how long a failing rank waits for ranks that fail, too.
const patience = 5 * time.Second

// leave ends a call. After a failure that all ranks see it waits until the others have left, too.
func (r *room) leave(failed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inside--
	r.changed.Broadcast()
	if !failed || !r.deserted {
		return
	}
	late := false
	timer := time.AfterFunc(patience, func() {
		r.mu.Lock()
		late = true
		r.changed.Broadcast()
		r.mu.Unlock()
	})
	defer timer.Stop()
	for r.inside > 0 && !late {
		r.changed.Wait()
	}
}
