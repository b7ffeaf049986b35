package comm

import (
	"ulysses/internal/status"
)

// A collective of goroutine ranks is a few meetings: each rank posts its arguments and meets the
// others, works in their memory, and meets them again before anyone may go on and change it. A rank
// never leaves while another may still be in its memory, not even when the job has failed.

// post enters the collective that comes next on this communicator.
func (c *localComm) post(name string, p localPost) (*localCall, error) {
	if c.closed {
		return nil, status.Errorf(status.InvalidArgument, "%s: the communicator is closed", name)
	}
	g := c.g
	g.mu.Lock()
	if err := g.job.err(); err != nil {
		g.mu.Unlock()
		return nil, err
	}
	o := g.calls[c.seq]
	if o == nil {
		o = g.newCall()
		o.seq, o.name = c.seq, name
		g.calls[c.seq] = o
	}
	if o.name != name {
		g.mu.Unlock()
		g.job.fail(status.Errorf(status.Comm, "call %d: rank %d calls %s where others call %s: all ranks must call in one order",
			c.seq, g.world[c.rank], name, o.name))
		return nil, g.job.err()
	}
	c.seq++
	slot := &o.posts[c.rank]
	p.here = true
	p.recvRows = append(slot.recvRows[:0], p.recvRows...) // the caller may reuse his slices at once
	p.sendRows = append(slot.sendRows[:0], p.sendRows...)
	*slot = p
	g.mu.Unlock()
	return o, nil
}

func (g *localGroup) newCall() *localCall {
	if n := len(g.spare); n > 0 {
		o := g.spare[n-1]
		g.spare = g.spare[:n-1]
		return o
	}
	n := len(g.world)
	return &localCall{posts: make([]localPost, n), pairs: newLocalPairs(n)}
}

// meet waits until all ranks have come to meeting k of the call. After the first meeting ranks are
// at work in others' memory until they come to the next.
func (c *localComm) meet(o *localCall, k int, last bool) error {
	g := c.g
	g.mu.Lock()
	defer g.mu.Unlock()
	if k > 0 {
		o.working--
	}
	o.met[k]++
	if o.met[k] == len(g.world) || g.job.err() != nil {
		g.cond.Broadcast()
	}
	for {
		if err := g.job.err(); err != nil {
			for o.working > 0 {
				g.cond.Wait()
			}
			return err
		}
		if o.met[k] == len(g.world) {
			break
		}
		if k == 0 && c.deserted(o) {
			continue
		}
		g.cond.Wait()
	}
	if last {
		g.leave(o)
	} else {
		o.working++
	}
	return nil
}

// deserted fails the job when a rank that the call waits for has ended. The group's lock is held,
// and released for a moment if so.
func (c *localComm) deserted(o *localCall) bool {
	for i := range o.posts {
		if w := c.g.world[i]; !o.posts[i].here && c.g.job.ended[w].Load() {
			c.g.mu.Unlock()
			c.g.job.fail(status.Errorf(status.Comm, "rank %d ended while rank %d waits for it in %s", w, c.g.world[c.rank], o.name))
			c.g.mu.Lock()
			return true
		}
	}
	return false
}

// leave is under the group's lock; the last rank to leave gives the call back.
func (g *localGroup) leave(o *localCall) {
	if o.done++; o.done < len(g.world) {
		return
	}
	delete(g.calls, o.seq)
	for i := range o.posts {
		p := &o.posts[i]
		*p = localPost{recvRows: p.recvRows[:0], sendRows: p.sendRows[:0]}
	}
	o.met, o.working, o.done, o.groups = [3]int{}, 0, 0, nil
	o.pairs.reset()
	g.spare = append(g.spare, o)
}

// mismatch fails the job because two ranks' arguments do not fit each other. The caller is between
// two meetings of the call, or at none (nil).
func (c *localComm) mismatch(o *localCall, format string, args ...any) error {
	c.g.job.fail(status.Errorf(status.Comm, format, args...))
	if o != nil {
		c.g.mu.Lock()
		o.working--
		c.g.cond.Broadcast()
		c.g.mu.Unlock()
	}
	return c.g.job.err()
}
