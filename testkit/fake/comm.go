package fake

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Comm is a communicator for host tensors and for tensors of a test device. It waits for the stream
// before it moves tensors of the device.
type Comm struct {
	comm.Comm // of the host
	d         *Device
}

// Communicator returns a communicator for device tensors on top of one for host tensors.
func Communicator(d *Device, host comm.Comm) comm.Comm { return &Comm{host, d} }

func (c *Comm) Kind() string { return "fake" }

func (c *Comm) Split(color, key int) (comm.Comm, error) {
	sub, err := c.Comm.Split(color, key)
	if err != nil || sub == nil {
		return nil, err
	}
	return &Comm{sub, c.d}, nil
}

// real waits for the stream and replaces tensors of the device by their host memory. Without
// tensors of the device, it does not wait.
func (c *Comm) real(op string, s device.Stream, ts ...*tensor.Tensor) (device.Stream, error) {
	for _, t := range ts {
		if t.IsNil() || t.Where == tensor.Host {
			continue
		}
		if s == nil {
			return nil, status.Errorf(status.InvalidArgument, "fake.%s: %v without a stream", op, *t)
		}
		var err error
		if *t, err = c.d.real(*t); err != nil {
			return nil, status.Errorf(status.Of(err), "fake.%s: %w", op, err)
		}
	}
	if s == nil {
		return nil, nil
	}
	return nil, s.Sync()
}

func (c *Comm) AllToAll(s device.Stream, dst, src tensor.Tensor, recv, send []int64) error {
	s, err := c.real("AllToAll", s, &dst, &src)
	if err != nil {
		return err
	}
	return c.Comm.AllToAll(s, dst, src, recv, send)
}

func (c *Comm) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recv, send []int64) (comm.Request, error) {
	s, err := c.real("AllToAllStart", s, &dst, &src)
	if err != nil {
		return nil, err
	}
	return c.Comm.AllToAllStart(s, dst, src, recv, send)
}

func (c *Comm) AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	s, err := c.real("AllReduce", s, &t)
	if err != nil {
		return err
	}
	return c.Comm.AllReduce(s, t, op)
}

func (c *Comm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	s, err := c.real("AllGather", s, &dst, &src)
	if err != nil {
		return err
	}
	return c.Comm.AllGather(s, dst, src, rows)
}

func (c *Comm) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	s, err := c.real("ReduceScatter", s, &dst, &src)
	if err != nil {
		return err
	}
	return c.Comm.ReduceScatter(s, dst, src, rows)
}

func (c *Comm) Broadcast(s device.Stream, t tensor.Tensor, root int) error {
	s, err := c.real("Broadcast", s, &t)
	if err != nil {
		return err
	}
	return c.Comm.Broadcast(s, t, root)
}

func (c *Comm) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	s, err := c.real("SendRecv", s, &recv, &send)
	if err != nil {
		return err
	}
	return c.Comm.SendRecv(s, recv, from, send, to)
}
