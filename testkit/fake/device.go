// Package fake is the test device. It computes with the operations of the CPU and differs from the
// host as a GPU does: the host cannot read its memory (an attempt faults), operations run later
// than the call, streams run in random order unless events order them, and activations may be
// BF16. Code that passes its tests here does not depend on operations that are complete when they
// return.
package fake

import (
	"math/rand/v2"
	"slices"

	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Options configure a test device.
type Options struct {
	Seed       uint64         // of the order in which streams run
	Compute    []tensor.DType // nil = BF16, F32
	HeadMajor  bool           // attention is fastest on [H, T, D], as on the CPU
	Memory     int64          // bytes in Info, and the limit of allocations; 0 = no limit
	Free       int64          // bytes of Memory that are free, in Info alone
	HostMemory int64          // most bytes of an allocation of AllocHost; 0 = no limit
}

// Device is a test device. It serves one goroutine at a time.
type Device struct {
	device.Calls
	inner   device.Device
	host    device.Stream // of inner
	options Options
	random  *rand.Rand
	streams []*stream
	lazy    *stream
	memory  []*buffer
	used    int64
	err     error // of the first operation that failed; nothing runs after it
}

// Open opens a test device.
func Open(o Options) (*Device, error) {
	inner, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		return nil, err
	}
	host, err := inner.NewStream()
	if err != nil {
		return nil, err
	}
	if o.Compute == nil {
		o.Compute = []tensor.DType{tensor.BF16, tensor.F32}
	}
	d := &Device{inner: inner, host: host, options: o, random: rand.New(rand.NewPCG(o.Seed, 0))}
	d.Calls = device.NewCalls(d.enqueue)
	return d, nil
}

// Info describes the device.
func (d *Device) Info() device.Info {
	return device.Info{Kind: "fake", Name: "test device", Kernels: "fake " + d.inner.Info().Kernels, Workers: 1,
		Align: 256, Place: tensor.CUDA, Compute: d.options.Compute, TokenMajor: !d.options.HeadMajor,
		Memory: d.options.Memory, Free: d.options.Free}
}

// Close runs what is still enqueued.
func (d *Device) Close() {
	d.drain()
	d.inner.Close()
}

// drain runs operations until none can run.
func (d *Device) drain() {
	for d.step() {
	}
}

// step runs the first task of a random stream. It returns false if none can run.
func (d *Device) step() bool {
	var ready []*stream
	for _, s := range d.streams {
		if len(s.queue) > 0 && (s.queue[0].after == nil || s.queue[0].after.passed) {
			ready = append(ready, s)
		}
	}
	if len(ready) == 0 {
		return false
	}
	// One stream at a time is lazy: it runs only when nothing else can, so that others get far
	// ahead of it.
	if d.lazy == nil || d.random.IntN(64) == 0 {
		d.lazy = d.streams[d.random.IntN(len(d.streams))]
	}
	if len(ready) > 1 {
		ready = slices.DeleteFunc(ready, func(s *stream) bool { return s == d.lazy })
	}
	s := ready[d.random.IntN(len(ready))]
	t := s.queue[0]
	s.queue = s.queue[1:]
	if t.mark != nil {
		t.mark.passed = true
	}
	if t.run != nil && d.err == nil {
		d.err = t.run()
	}
	return true
}

// until runs tasks of random streams until done returns true.
func (d *Device) until(done func() bool) error {
	for !done() {
		if !d.step() {
			return status.Errorf(status.Internal, "fake: deadlock: the streams wait for each other")
		}
	}
	return d.err
}

// mark is one recording of an event. passed: the stream has run up to it.
type mark struct{ passed bool }

// task is an operation in a stream, a recording, or a wait.
type task struct {
	run   func() error
	mark  *mark  // recorded here
	after *mark  // the task waits for this recording
	reads []byte // host memory that the operation reads; nil = none
}

type stream struct {
	d     *Device
	queue []task
}

// NewStream returns an empty stream.
func (d *Device) NewStream() (device.Stream, error) {
	s := &stream{d: d}
	d.streams = append(d.streams, s)
	return s, nil
}

func (s *stream) Sync() error { return s.d.until(func() bool { return len(s.queue) == 0 }) }

func (s *stream) Record(e device.Event) error {
	x, ok := e.(*event)
	if !ok || x.d != s.d {
		return status.Errorf(status.InvalidArgument, "fake.Record: an event of another device")
	}
	x.last = new(mark)
	s.queue = append(s.queue, task{mark: x.last})
	return nil
}

func (s *stream) Wait(e device.Event) error {
	x, ok := e.(*event)
	if !ok || x.d != s.d {
		return status.Errorf(status.InvalidArgument, "fake.Wait: an event of another device")
	}
	if x.last != nil {
		s.queue = append(s.queue, task{after: x.last})
	}
	return nil
}

func (s *stream) Close() {
	_ = s.Sync()
	s.d.streams = slices.DeleteFunc(s.d.streams, func(x *stream) bool { return x == s })
}

type event struct {
	d    *Device
	last *mark
}

// NewEvent returns an event that was never recorded.
func (d *Device) NewEvent() (device.Event, error) { return &event{d: d}, nil }

func (e *event) Sync() error {
	return e.d.until(func() bool { return e.last == nil || e.last.passed })
}
func (e *event) Close() {}

var _ device.Device = (*Device)(nil)
