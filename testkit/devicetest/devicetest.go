// Package devicetest opens devices for tests of packages that use a device: the test device, whose
// operations run late and in random order, the CUDA plug-in, real or emulated, and the CPU.
package devicetest

import (
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/fake"
)

// Kind opens a device for a rank, and a communicator for tensors of the device on top of one for
// host tensors. done closes the communicator for device tensors. All ranks call it, if no test has
// failed, before they free memory that was communicated.
type Kind struct {
	Name string
	Open func(host comm.Comm) (d device.Device, c comm.Comm, done func() error, err error)
}

// Fake is the test device. Each rank has another order of streams.
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

// CPU is the CPU with one worker.
func CPU() Kind {
	return Kind{"cpu", func(host comm.Comm) (device.Device, comm.Comm, func() error, error) {
		d, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: 1})
		return d, host, func() error { return nil }, err
	}}
}

// CUDA is the CUDA plug-in. With throughHost, communication is staged through host memory,
// otherwise the transport is chosen automatically.
func CUDA(t testing.TB, name string, throughHost bool) Kind {
	cudatest.Use(t)
	return Kind{name, func(host comm.Comm) (device.Device, comm.Comm, func() error, error) {
		d, _, err := backends.Open(backends.Choice{Backend: "cuda", LocalRank: host.Rank(), RanksOnNode: host.Size()})
		if err != nil {
			return nil, nil, nil, err
		}
		sub, err := host.Split(0, host.Rank()) // closed with the communicator
		if err != nil {
			return nil, nil, nil, err
		}
		policy := "auto"
		if throughHost {
			policy = sub.Kind()
		}
		c, _, err := backends.OpenComm(d, sub, policy)
		if err != nil {
			return nil, nil, nil, err
		}
		return d, c, c.Close, nil
	}}
}
