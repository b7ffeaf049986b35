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

func (c *logged) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	c.n++
	name := fmt.Sprint(c.n)
	*c.log = append(*c.log, "start "+name)
	r, err := c.Comm.AllToAllStart(s, dst, src, recvRows, sendRows)
	return &loggedRequest{r, c.log, name}, err
}

func (r *layerRun) overlapped(s device.Stream, say func(string)) error {
	p := r.p
	for _, f := range []struct {
		name string
		call func() error
	}{
		{"", func() error { return p.StartForward(s, r.x, &r.a) }},
		{"q", func() error { return p.SendQ(s) }}, {"k", func() error { return p.SendK(s) }}, {"v", func() error { return p.SendV(s) }},
		{"", func() error { return p.FinishForward(s) }},
		{"", func() error { return p.StartBackward(s, r.x, &r.a, &r.g) }}, {"out weights", func() error { return p.MidBackward(s) }},
		{"", func() error { return p.WaitDV(s) }}, {"v weights", func() error { return p.WaitDK(s) }}, {"k weights", func() error { return p.WaitDQ(s) }},
	} {
		if f.name != "" {
			say(f.name)
		}
		if err := f.call(); err != nil {
			return err
		}
	}
	return nil
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
		order := []string{"q", "start 1", "k", "start 2", "v", "start 3", "wait 1", "wait 2", "wait 3", "start 4", "out weights", "wait 4",
			"start 5", "start 6", "start 7", "wait 5", "v weights", "wait 6", "k weights", "wait 7"}
		if c.Size() > 1 && !slices.Equal(log, order) {
			return fmt.Errorf("order %v", log)
		}
		for _, x := range []struct {
			name      string
			got, want tensor.Tensor
		}{{"out", got.a.Out, want.a.Out}, {"lse", addUnitAxis(got.a.LSE), addUnitAxis(want.a.LSE)}, {"dq", got.g.DQ, want.g.DQ}, {"dk", got.g.DK, want.g.DK}, {"dv", got.g.DV, want.g.DV}} {
			if err := sameBits(x.name, x.got, x.want, 0); err != nil {
				return err
			}
		}
		refused(t, c, got.p.SendK(b.stream), "out of order")
		refused(t, c, got.p.WaitDV(b.stream), "out of order")
		return b.gapsIntact()
	})
}
