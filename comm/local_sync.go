package comm

import (
	"ulysses/internal/status"
)

// A collective of goroutine ranks has up to three barriers. Each rank posts its arguments and waits
// at barrier 0, then reads and writes the memory of other ranks, then waits at the next barrier
// before its caller may change that memory. A rank never returns while another rank may be in its
// memory, also after the job has failed.

// post posts the arguments of this rank's next collective.
func (c *localComm) post(name string, p localPost) (*localCall, error) {
	if c.closed {
		return nil, errClosed(name)
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
		g.job.fail(status.Errorf(status.Comm,
			"call %d: rank %d calls %s, other ranks call %s; all ranks must make the same calls in the same order",
			c.seq, g.world[c.rank], name, o.name))
		return nil, g.job.err()
	}
	c.seq++
	slot := &o.posts[c.rank]
	p.posted = true
	p.recvRows = append(slot.recvRows[:0], p.recvRows...) // the caller may change its slices
	p.sendRows = append(slot.sendRows[:0], p.sendRows...)
	*slot = p
	if o.posted++; o.posted == len(o.posts) {
		o.allAt = g.job.now()
	}
	g.mu.Unlock()
	return o, nil
}

func (g *localGroup) newCall() *localCall {
	o := g.spare.get()
	if n := len(g.world); o.posts == nil {
		o.posts, o.copies = make([]localPost, n), newLocalCopies(n)
	}
	return o
}

// barrier waits until all ranks have arrived at barrier k of the call. After it, unless it is the
// last, this rank may use the memory of other ranks until the next one.
func (c *localComm) barrier(o *localCall, k int, last bool) error {
	g := c.g
	g.mu.Lock()
	defer g.mu.Unlock()
	began := g.job.now()
	if k > 0 {
		o.working--
	}
	o.arrived[k]++
	if o.arrived[k] == len(g.world) || g.job.err() != nil {
		g.cond.Broadcast()
	}
	for {
		if err := g.job.err(); err != nil {
			for o.working > 0 {
				g.cond.Wait()
			}
			return err
		}
		if o.arrived[k] == len(g.world) {
			break
		}
		if k == 0 && c.failIfRankEnded(o) {
			continue
		}
		g.cond.Wait()
	}
	if k == 0 {
		c.addWaiting(began, o.allAt)
	}
	if last {
		g.leave(o)
	} else {
		o.working++
	}
	return nil
}

// failIfRankEnded fails the job and returns true if a rank for which the call waits has ended. The
// caller holds the lock of the group.
func (c *localComm) failIfRankEnded(o *localCall) bool {
	for i := range o.posts {
		if !o.posts[i].posted && c.g.job.ended[c.g.world[i]].Load() {
			c.failEnded(o.name, i)
			return true
		}
	}
	return false
}

// failEnded fails the job because a rank has ended that this rank waits for. The caller holds the
// lock of the group, which is released meanwhile.
func (c *localComm) failEnded(name string, rank int) {
	g := c.g
	g.mu.Unlock()
	g.job.fail(status.Errorf(status.Comm, "rank %d ended while rank %d waits for it in %s", g.world[rank],
		g.world[c.rank], name))
	g.mu.Lock()
}

// leave counts a rank that has finished the call; the last one makes the call reusable. The caller
// holds the lock of the group.
func (g *localGroup) leave(o *localCall) {
	if o.done++; o.done < len(g.world) {
		return
	}
	delete(g.calls, o.seq)
	for i := range o.posts {
		p := &o.posts[i]
		*p = localPost{recvRows: p.recvRows[:0], sendRows: p.sendRows[:0]}
	}
	o.posted, o.arrived, o.working, o.done, o.groups = 0, [3]int{}, 0, 0, nil
	o.copies.reset()
	g.spare.put(o)
}

// mismatch fails the job because the arguments of two ranks do not fit each other. The caller is
// between two barriers of the call.
func (c *localComm) mismatch(o *localCall, format string, args ...any) error {
	c.g.job.fail(status.Errorf(status.Comm, format, args...))
	c.g.mu.Lock()
	o.working--
	c.g.cond.Broadcast()
	c.g.mu.Unlock()
	return c.g.job.err()
}
