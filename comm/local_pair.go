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
	if err := cmp.Or(checkSendRecv(recv, from, send, to, n), ready(s)); err != nil {
		return err
	}
	if c.closed {
		return status.Errorf(status.InvalidArgument, "%s: the communicator is closed", name)
	}
	g, m := c.g, &c.message
	g.mu.Lock()
	defer g.mu.Unlock()
	if to >= 0 {
		*m = localMessage{t: send}
		w := &g.wires[c.rank*n+to]
		*w = append(*w, m)
		g.cond.Broadcast()
	}
	if from >= 0 {
		if err := c.receive(name, recv, from); err != nil {
			return c.unsend(to, err)
		}
	}
	for to >= 0 && !m.done {
		if err := c.halted(name, to); err != nil {
			return c.unsend(to, err)
		}
		if !m.done {
			g.cond.Wait()
		}
	}
	return nil
}

// receive is under the group's lock, released while memory moves.
func (c *localComm) receive(name string, recv tensor.Tensor, from int) error {
	g := c.g
	w := &g.wires[from*c.Size()+c.rank]
	for len(*w) == 0 {
		if err := c.halted(name, from); err != nil {
			return err
		}
		if len(*w) == 0 {
			g.cond.Wait()
		}
	}
	if err := g.job.err(); err != nil {
		return err
	}
	m := (*w)[0]
	*w = slices.Delete(*w, 0, 1)
	m.busy = true
	g.mu.Unlock()
	fits := m.t.Bytes() == recv.Bytes()
	if fits {
		copyBytes(recv.Data, m.t.Data, recv.Bytes())
	} else {
		g.job.fail(status.Errorf(status.Comm, "%s: rank %d sends %v to rank %d, which expects %v", name, from, m.t, c.rank, recv))
	}
	g.mu.Lock()
	m.busy, m.done = false, true
	g.cond.Broadcast()
	return g.job.err()
}

// halted is the reason to stop waiting for a peer, if there is one. The group's lock is held,
// perhaps released for a moment.
func (c *localComm) halted(name string, peer int) error {
	g := c.g
	if w := g.world[peer]; g.job.err() == nil && g.job.ended[w].Load() {
		g.mu.Unlock()
		g.job.fail(status.Errorf(status.Comm, "rank %d ended while rank %d waits for it in %s", w, g.world[c.rank], name))
		g.mu.Lock()
	}
	return g.job.err()
}

// unsend waits until nobody is in the memory of a message that is given up.
func (c *localComm) unsend(to int, err error) error {
	for to >= 0 && c.message.busy {
		c.g.cond.Wait()
	}
	return err
}
