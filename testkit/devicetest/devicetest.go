// Package devicetest opens devices for tests of what stands above the device: the fake, which runs
// late and in random order, the CUDA plug-in, real or emulated, and the host's own.
package devicetest

import (
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/fake"
)

// Kind is a way to open a device for a rank, and the communicator that serves its tensors on top of
// one for the host. done gives the communicator up, but the host's: all ranks call it, before
// memory that was exchanged is freed, and when nothing has failed.
type Kind struct {
	Name string
	Open func(host comm.Comm) (d device.Device, c comm.Comm, done func() error, err error)
}

// Fake is a fake device; ranks run in different orders.
func Fake(name string, o fake.Options) Kind {
	return Kind{name, func(host comm.Comm) (device.Device, comm.Comm, func() error, error) {
		o := o
		o.Seed = uint64(host.Size()*10 + host.Rank())
		d, err := fake.Open(o)
		if err != nil {
			return nil, nil, nil, err
		}
		return d, fake.Communicator(d, host), func() error { return nil }, nil
	}}
}

// CPU is the host's own device, of one worker.
func CPU() Kind {
	return Kind{"cpu", func(host comm.Comm) (device.Device, comm.Comm, func() error, error) {
		d, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: 1})
		return d, host, func() error { return nil }, err
	}}
}

// CUDA is the plug-in. Through the host, or by what is chosen otherwise.
func CUDA(t testing.TB, name string, throughHost bool) Kind {
	cudatest.Use(t)
	return Kind{name, func(host comm.Comm) (device.Device, comm.Comm, func() error, error) {
		d, _, err := backends.Open(backends.Choice{Backend: "cuda", LocalRank: host.Rank(), RanksOnNode: host.Size()})
		if err != nil {
			return nil, nil, nil, err
		}
		part, err := host.Split(0, host.Rank()) // which goes with the communicator
		if err != nil {
			return nil, nil, nil, err
		}
		policy := "auto"
		if throughHost {
			policy = part.Kind()
		}
		c, _, err := backends.OpenComm(d, part, policy)
		if err != nil {
			return nil, nil, nil, err
		}
		return d, c, c.Close, nil
	}}
}
