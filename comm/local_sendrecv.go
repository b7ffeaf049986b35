package comm

import (
	"cmp"
	"slices"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

func (c *localComm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	const name = "comm.SendRecv"
	n := c.Size()
	if err := cmp.Or(checkSendRecv(recv, from, send, to, n), waitFor(s)); err != nil {
		return err
	}
	if c.closed {
		return errClosed(name)
	}
	g, m := c.g, &c.message
	g.mu.Lock()
	defer g.mu.Unlock()
	if to >= 0 {
		*m = localMessage{t: send}
		q := &g.queue[c.rank*n+to]
		*q = append(*q, m)
		g.cond.Broadcast()
	}
	if from >= 0 {
		if err := c.receive(name, recv, from); err != nil {
			return c.withdraw(to, err)
		}
	}
	began := g.job.now()
	for to >= 0 && !m.done {
		if err := c.stopped(name, to); err != nil {
			return c.withdraw(to, err)
		}
		if !m.done {
			g.cond.Wait()
		}
	}
	if to >= 0 {
		c.addWaiting(began, m.takenAt)
	}
	return nil
}

// receive waits for the next message from a rank and copies it. The caller holds the lock of the
// group, which is released during the copy.
func (c *localComm) receive(name string, recv tensor.Tensor, from int) error {
	g := c.g
	q := &g.queue[from*c.Size()+c.rank]
	began := g.job.now()
	for len(*q) == 0 {
		if err := c.stopped(name, from); err != nil {
			return err
		}
		if len(*q) == 0 {
			g.cond.Wait()
		}
	}
	if err := g.job.err(); err != nil {
		return err
	}
	m := (*q)[0]
	*q = slices.Delete(*q, 0, 1)
	m.busy, m.takenAt = true, g.job.now()
	c.addWaiting(began, m.takenAt)
	g.mu.Unlock()
	if m.t.Bytes() == recv.Bytes() {
		copyBytes(recv.Data, m.t.Data, recv.Bytes())
	} else {
		g.job.fail(status.Errorf(status.Comm,
			"%s: rank %d sends %v to rank %d, which expects %v; both must give one size", name, from, m.t,
			c.rank, recv))
	}
	g.mu.Lock()
	m.busy, m.done = false, true
	g.cond.Broadcast()
	return g.job.err()
}

// stopped returns an error if the job has ended or the peer has. The caller holds the lock of the
// group, which may be released meanwhile.
func (c *localComm) stopped(name string, peer int) error {
	if j := c.g.job; j.err() == nil && j.ended[c.g.world[peer]].Load() {
		c.failEnded(name, peer)
	}
	return c.g.job.err()
}

// withdraw waits until the receiver no longer reads the message that this rank has sent, and
// returns err.
func (c *localComm) withdraw(to int, err error) error {
	for to >= 0 && c.message.busy {
		c.g.cond.Wait()
	}
	return err
}
