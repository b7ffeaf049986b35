package comm

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// The all-to-all of goroutine ranks is a set of copies, one for each pair (receiver, sender). A
// copy is possible when both ranks have posted their arguments. A rank in Wait first copies into
// its own dst. Then it copies out of its src for receivers that are not in Wait. Therefore no Wait
// depends on another rank's Wait, and requests may be waited for in any order, as with MPI.

func (c *localComm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	r, err := c.AllToAllStart(s, dst, src, recvRows, sendRows)
	if err != nil {
		return err
	}
	return r.Wait()
}

func (c *localComm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (Request, error) {
	if err := checkAllToAll(dst, src, recvRows, sendRows, c.Size()); err != nil {
		return nil, err
	}
	if err := waitFor(s); err != nil {
		return nil, err
	}
	o, err := c.post("comm.AllToAll", localPost{dst: dst, src: src, recvRows: recvRows, sendRows: sendRows})
	if err != nil {
		return nil, err
	}
	c.g.mu.Lock()
	c.g.cond.Broadcast()
	c.g.mu.Unlock()
	r := c.spare.get()
	r.c, r.o = c, o
	return r, nil
}

// Wait makes copies until the all-to-all is complete on this rank.
func (r *localRequest) Wait() error {
	c, o := r.c, r.o
	if o == nil {
		return ErrWaited()
	}
	r.o = nil
	c.spare.put(r)
	g, i := c.g, c.rank
	g.mu.Lock()
	defer g.mu.Unlock()
	began := g.job.now()
	o.posts[i].waiting = true
	for {
		if err := g.job.err(); err != nil {
			for o.copies.busy[i] > 0 {
				g.cond.Wait()
			}
			return err
		}
		if to, from, ok := o.next(i); ok {
			c.makeCopy(o, to, from)
			continue
		}
		if o.complete(i) {
			c.addWaiting(began, o.allAt)
			g.leave(o)
			return nil
		}
		if !c.failIfRankEnded(o) {
			g.cond.Wait()
		}
	}
}

// complete reports whether all copies to and from rank i are complete.
func (o *localCall) complete(i int) bool {
	return o.copies.received[i] == len(o.posts) && o.copies.sent[i] == len(o.posts)
}

// Test makes the copies that are possible now and reports whether Wait would return at once.
func (r *localRequest) Test() (bool, error) {
	c, o := r.c, r.o
	if o == nil {
		return true, nil
	}
	c.g.mu.Lock()
	defer c.g.mu.Unlock()
	for {
		if err := c.g.job.err(); err != nil {
			return false, err
		}
		to, from, ok := o.next(c.rank)
		if !ok {
			return o.complete(c.rank), nil
		}
		c.makeCopy(o, to, from)
	}
}

// next returns a copy that rank i should make: into its own dst or, if there is none, out of its
// src for a receiver that is not in Wait.
func (o *localCall) next(i int) (to, from int, ok bool) {
	n := len(o.posts)
	for k := range n {
		if j := (i + k) % n; o.posts[j].posted && !o.copies.claimed[i*n+j] {
			return i, j, true
		}
	}
	for k := range n {
		if j := (i + n - k) % n; o.posts[j].posted && !o.posts[j].waiting && !o.copies.claimed[j*n+i] {
			return j, i, true
		}
	}
	return 0, 0, false
}

// makeCopy copies one block. The caller holds the lock of the group, which is released during the
// copy.
func (c *localComm) makeCopy(o *localCall, to, from int) {
	g, p := c.g, &o.copies
	p.claimed[to*len(o.posts)+from] = true
	p.busy[to]++
	p.busy[from]++
	g.mu.Unlock()
	r, s := &o.posts[to], &o.posts[from]
	recv, send := r.recvRows[from]*rowBytes(r.dst), s.sendRows[to]*rowBytes(s.src)
	if recv == send {
		copyBytes(blockAt(r.dst.Data, before(r.recvRows, from)*rowBytes(r.dst), recv),
			blockAt(s.src.Data, before(s.sendRows, to)*rowBytes(s.src), send), send)
	} else {
		g.job.fail(status.Errorf(status.Comm,
			"comm.AllToAll: rank %d sends %d rows of %v to rank %d, which expects %d rows of %v; counts must be equal",
			from, s.sendRows[to], s.src, to, r.recvRows[from], r.dst))
	}
	g.mu.Lock()
	p.busy[to]--
	p.busy[from]--
	p.received[to]++
	p.sent[from]++
	n := len(o.posts)
	if p.received[to] == n || p.sent[from] == n || g.job.err() != nil {
		g.cond.Broadcast()
	}
}
