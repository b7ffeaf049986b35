// Package gathers lets one rank of a test wait until the ranks communicate.
package gathers

import (
	"errors"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
)

// Comm tells a channel of each all-gather of its rank, if something waits for it.
type Comm struct {
	comm.Comm
	calls chan<- struct{}
}

// New wraps the communicator of a rank.
func New(c comm.Comm, calls chan<- struct{}) *Comm { return &Comm{c, calls} }

// AllGather is comm.Comm's.
func (c *Comm) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	select {
	case c.calls <- struct{}{}:
	default:
	}
	return c.Comm.AllGather(s, dst, src, rows)
}

// Wait waits for two all-gathers. It returns an error if there are none.
func Wait(calls <-chan struct{}) error {
	for range 2 {
		select {
		case <-calls:
		case <-time.After(time.Minute):
			return errors.New("the ranks do not communicate")
		}
	}
	return nil
}
