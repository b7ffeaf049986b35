package comm

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// The all-to-all of goroutine ranks is a set of copies, one for each (receiver, sender), that
// becomes possible when both have posted. A waiting rank does its own copies first and then those
// that touch its memory and whose other rank is busy elsewhere, so it waits for nobody's Wait: as
// with MPI, requests may be waited for in any order.

func (c *localComm) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	r, err := c.AllToAllStart(s, dst, src, recvRows, sendRows)
	if err != nil {
		return err
	}
	return r.Wait()
}

func (c *localComm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (Request, error) {
	if err := checkAllToAll(dst, src, recvRows, sendRows, c.Size()); err != nil {
		return nil, err
	}
	if err := ready(s); err != nil {
		return nil, err
	}
	o, err := c.post("comm.AllToAll", localPost{dst: dst, src: src, recvRows: recvRows, sendRows: sendRows})
	if err != nil {
		return nil, err
	}
	c.g.mu.Lock()
	c.g.cond.Broadcast()
	c.g.mu.Unlock()
	var r *localRequest
	if n := len(c.spare); n > 0 {
		r, c.spare = c.spare[n-1], c.spare[:n-1]
	} else {
		r = &localRequest{c: c}
	}
	r.o = o
	return r, nil
}

// Wait finishes the exchange. It is called once.
func (r *localRequest) Wait() error {
	c, o := r.c, r.o
	if o == nil {
		return status.Errorf(status.InvalidArgument, "comm.AllToAll: the request has been waited for already")
	}
	r.o = nil
	c.spare = append(c.spare, r)
	g, i, n := c.g, c.rank, c.Size()
	g.mu.Lock()
	defer g.mu.Unlock()
	o.posts[i].waiting = true
	for {
		if err := g.job.err(); err != nil {
			for o.pairs.busy[i] > 0 {
				g.cond.Wait()
			}
			return err
		}
		if to, from, ok := o.next(i); ok {
			c.move(o, to, from)
			continue
		}
		if o.pairs.pulled[i] == n && o.pairs.taken[i] == n {
			g.leave(o)
			return nil
		}
		if !c.deserted(o) {
			g.cond.Wait()
		}
	}
}

// Test does the copies that are possible now and reports whether Wait would return at once.
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
			return o.pairs.pulled[c.rank] == c.Size() && o.pairs.taken[c.rank] == c.Size(), nil
		}
		c.move(o, to, from)
	}
}

// next finds a copy for rank i to do: into its own memory first, else out of it for a rank that is
// not there to do it.
func (o *localCall) next(i int) (to, from int, ok bool) {
	n := len(o.posts)
	for k := range n {
		if j := (i + k) % n; o.posts[j].here && !o.pairs.claimed[i*n+j] {
			return i, j, true
		}
	}
	for k := range n {
		if j := (i + n - k) % n; o.posts[j].here && !o.posts[j].waiting && !o.pairs.claimed[j*n+i] {
			return j, i, true
		}
	}
	return 0, 0, false
}

// move does one copy. The group's lock is held, and released while memory moves.
func (c *localComm) move(o *localCall, to, from int) {
	g, p := c.g, &o.pairs
	p.claimed[to*len(o.posts)+from] = true
	p.busy[to]++
	p.busy[from]++
	g.mu.Unlock()
	r, s := &o.posts[to], &o.posts[from]
	recv, send := r.recvRows[from]*rowBytes(r.dst), s.sendRows[to]*rowBytes(s.src)
	if recv == send {
		copyBytes(place(r.dst.Data, before(r.recvRows, from)*rowBytes(r.dst), recv),
			place(s.src.Data, before(s.sendRows, to)*rowBytes(s.src), send), send)
	} else {
		g.job.fail(status.Errorf(status.Comm, "comm.AllToAll: rank %d sends %d rows of %v to rank %d, which expects %d rows of %v",
			from, s.sendRows[to], s.src, to, r.recvRows[from], r.dst))
	}
	g.mu.Lock()
	p.busy[to]--
	p.busy[from]--
	p.pulled[to]++
	p.taken[from]++
	n := len(o.posts)
	if p.pulled[to] == n || p.taken[from] == n || g.job.err() != nil {
		g.cond.Broadcast()
	}
}
