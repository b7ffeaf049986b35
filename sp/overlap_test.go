package sp

import (
	"fmt"
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// logged is a communicator that logs when all-to-alls start and end.
type logged struct {
	comm.Comm
	log *[]string
	n   int
}

type loggedRequest struct {
	comm.Request
	log  *[]string
	name string
}

func (r *loggedRequest) Wait() error {
	*r.log = append(*r.log, "wait "+r.name)
	return r.Request.Wait()
}

func (c *logged) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (comm.Request, error) {
	c.n++
	name := fmt.Sprint(c.n)
	*c.log = append(*c.log, "start "+name)
	r, err := c.Comm.AllToAllStart(s, dst, src, recvRows, sendRows)
	return &loggedRequest{r, c.log, name}, err
}

// overlapped computes Forward and Backward in their overlapped form. It calls say before the steps
// that follow a computation of the caller.
func (r *layerRun) overlapped(s device.Stream, say func(string)) error {
	o, err := &r.over, r.p.StartForward(r.x, &r.a, &r.over)
	do := func(name string, steps ...Step) {
		say(name)
		for _, step := range steps {
			if err == nil {
				err = o.Do(s, step)
			}
		}
	}
	do("q", SendQ)
	do("k", SendK)
	do("v", SendV, AttendForward)
	if err == nil {
		err = r.p.StartBackward(s, r.x, &r.a, &r.g, o)
	}
	do("out weights", AttendBackward, WaitDV)
	do("v weights", WaitDK)
	do("k weights", WaitDQ)
	return err
}

// The overlapped form gives the bits of Forward and Backward, and sends as many bytes. Each tensor
// is sent as soon as it is projected, and each gradient is waited for only when it is used.
func TestOverlapped(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		want := prepare(b, c, lc.layer, lc.batch, 0, 0)
		if err := want.forwardBackward(b); err != nil {
			return err
		}
		var log []string
		count := &counted{Comm: &logged{Comm: c, log: &log}}
		got := prepare(b, count, lc.layer, lc.batch, 0, 0)
		count.bytes = 0
		if err := got.overlapped(b.stream, func(s string) { log = append(log, s) }); err != nil {
			return err
		}
		forward, backward := got.p.BytesSent(got.x)
		if sum := forward + backward + got.p.LSEBytesSent(got.x); count.bytes != sum {
			return fmt.Errorf("%d bytes sent, planned %d", count.bytes, sum)
		}
		order := []string{"q", "start 1", "k", "start 2", "v", "start 3", "wait 1", "wait 2", "wait 3", "start 4",
			"out weights", "wait 4",
			"start 5", "start 6", "start 7", "wait 5", "v weights", "wait 6", "k weights", "wait 7"}
		if c.Size() > 1 && !slices.Equal(log, order) {
			return fmt.Errorf("order %v", log)
		}
		for _, x := range []struct {
			name      string
			got, want tensor.Tensor
		}{{"out", got.a.Out, want.a.Out}, {"lse", addUnitAxis(got.a.LSE), addUnitAxis(want.a.LSE)},
			{"dq", got.g.DQ, want.g.DQ}, {"dk", got.g.DK, want.g.DK}, {"dv", got.g.DV, want.g.DV}} {
			if err := sameBits(x.name, x.got, x.want, 0); err != nil {
				return err
			}
		}
		return b.gapsIntact()
	})
}

// pooled is a communicator with buffers, as that of the staged transport: an all-to-all takes the
// smallest free one that is large enough until it is complete. It refuses one that finds none.
type pooled struct {
	comm.Comm
	free []int64 // bytes of the free buffers, in increasing order
}

type pooledRequest struct {
	comm.Request
	c      *pooled
	buffer int64
}

func (r *pooledRequest) Wait() error {
	r.c.put(r.buffer)
	return r.Request.Wait()
}

func (c *pooled) put(buffer int64) {
	c.free = append(c.free, buffer)
	slices.Sort(c.free)
}

// take takes a buffer; false = none is large enough.
func (c *pooled) take(bytes int64) (buffer int64, ok bool) {
	i, _ := slices.BinarySearch(c.free, bytes)
	if i == len(c.free) {
		return 0, false
	}
	buffer = c.free[i]
	c.free = slices.Delete(c.free, i, i+1)
	return buffer, true
}

// Reserve implements comm.Reserve. A new buffer takes the place of one that is too small.
func (c *pooled) Reserve(n int, bytes int64) error {
	var taken []int64
	for range n {
		buffer, ok := c.take(bytes)
		if !ok {
			buffer, c.free = bytes, c.free[:max(0, len(c.free)-1)]
		}
		taken = append(taken, buffer)
	}
	for _, buffer := range taken {
		c.put(buffer)
	}
	return nil
}

func (c *pooled) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	r, err := c.AllToAllStart(s, dst, src, recvRows, sendRows)
	if err != nil {
		return err
	}
	return r.Wait()
}

func (c *pooled) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (comm.Request, error) {
	bytes := bytesOfOthers(c, src, sendRows) + bytesOfOthers(c, dst, recvRows)
	buffer, ok := c.take(bytes)
	if !ok {
		return nil, fmt.Errorf("an all-to-all of %d bytes finds the buffers %d", bytes, c.free)
	}
	r, err := c.Comm.AllToAllStart(s, dst, src, recvRows, sendRows)
	return &pooledRequest{r, c, buffer}, err
}

// After Reserve, no all-to-all needs a further buffer, also not in the overlapped form of a plan
// that says so.
func TestReservedBuffers(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		for i := range 4 {
			overlapped, ring := i%2 == 1, int64(1+i/2)
			if int64(c.Size())%ring != 0 {
				continue
			}
			lc.layer.Overlapped, lc.layer.Ring, lc.batch.Ring = overlapped, ring, ring
			r := prepare(b, &pooled{Comm: c}, lc.layer, lc.batch, 0, 0)
			err := r.p.ReserveFor(r.x)
			if err == nil {
				err = r.forwardBackward(b)
			}
			if err == nil && overlapped {
				err = r.overlapped(b.stream, func(string) {})
			}
			if err != nil {
				return fmt.Errorf("overlapped %v, ring %d: %w", overlapped, ring, err)
			}
		}
		return nil
	})
}

// A step out of order is refused and changes nothing. A pass that was canceled at any step leaves
// no all-to-all in progress, and the plan computes the next pass.
func TestOverlapOrder(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		want, got := prepare(b, c, lc.layer, lc.batch, 0, 0), prepare(b, c, lc.layer, lc.batch, 0, 0)
		if err := want.forwardBackward(b); err != nil {
			return err
		}
		o, s := &got.over, b.stream
		refused(t, c, o.Do(s, SendQ), "SendQ is called out of order; the start of a pass is due")
		refused(t, c, o.Do(s, NoStep), "out of order")
		for steps := range 5 { // of a canceled pass
			if err := got.p.StartForward(got.x, &got.a, o); err != nil {
				return err
			}
			for range min(steps, 3) {
				refused(t, c, o.Do(s, WaitDQ), "WaitDQ is called out of order; "+o.Due().String()+" is due")
				if err := o.Do(s, o.Due()); err != nil {
					return err
				}
			}
			refused(t, c, got.p.StartForward(got.x, &got.a, o), "a pass is in progress")
			refused(t, c, got.p.StartBackward(s, got.x, &got.a, &got.g, o), "a pass is in progress")
			if steps == 4 { // backward is canceled as well
				if err := o.Do(s, AttendForward); err != nil {
					return err
				}
				if err := got.p.StartBackward(s, got.x, &got.a, &got.g, o); err != nil {
					return err
				}
				refused(t, c, o.Do(s, WaitDV), "AttendBackward is due")
				if err := o.Do(s, AttendBackward); err != nil {
					return err
				}
			}
			if err := o.Cancel(); err != nil {
				return err
			}
		}
		if err := got.overlapped(s, func(string) {}); err != nil {
			return err
		}
		if err := sameBits("dq", got.g.DQ, want.g.DQ, 0); err != nil {
			return err
		}
		return b.gapsIntact()
	})
}
