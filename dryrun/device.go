package dryrun

import (
	"maps"
	"syscall"
	"unsafe"

	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Sizes returns the memory that a device's operations need.
type Sizes interface {
	AttentionWorkspace(a *device.Attention, backward bool) int64
	GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes
}

// Device stands for a device that info describes. It runs no operation and adds up time. With host
// memory, an operation ends before the call returns; otherwise it is enqueued.
type Device struct {
	Sizes
	device.Calls
	info  device.Info
	rates Rates
	clock *clock.Clock
	now   float64 // seconds on the host's clock
	ends  float64 // of the work that ends last
	spent Account
}

// Account is the time and the traffic so far.
type Account struct {
	Seconds float64 // until everything is done
	// seconds of operations and exchanges, those that others hide included, by the clock's phase
	Phases   map[string]float64
	Meetings map[string]int64 // waits for other ranks, by phase
	// bytes sent to ranks of the same node and of others, but for what hosts settle among
	// themselves
	Node, Network int64
}

// Open makes a device. What operations take is charged to the phase that the clock is in when they
// are called; it may be nil.
func Open(info device.Info, sizes Sizes, rates Rates, c *clock.Clock) (*Device, error) {
	if err := rates.Check(); err != nil {
		return nil, err
	}
	d := &Device{Sizes: sizes, info: info, rates: rates, clock: c, spent: Account{Phases: map[string]float64{}, Meetings: map[string]int64{}}}
	d.Calls = device.NewCalls(d.enqueue)
	return d, nil
}

// Info describes the device that is planned for.
func (d *Device) Info() device.Info { return d.info }
func (d *Device) Close()            {}

// Spent returns the account after all operations have ended.
func (d *Device) Spent() Account {
	d.now = max(d.now, d.ends)
	x := d.spent
	x.Seconds, x.Phases, x.Meetings = d.now, maps.Clone(d.spent.Phases), maps.Clone(d.spent.Meetings)
	return x
}

// Plus returns x plus y multiplied by times.
func (x Account) Plus(y Account, times int64) Account {
	n := float64(times)
	sum := Account{x.Seconds + n*y.Seconds, maps.Clone(x.Phases), maps.Clone(x.Meetings), x.Node + times*y.Node, x.Network + times*y.Network}
	for name, meetings := range y.Meetings {
		sum.Meetings[name] += times * meetings
	}
	for name, seconds := range y.Phases {
		sum.Phases[name] += n * seconds
	}
	return sum
}

// late says that operations return before they are done.
func (d *Device) late() bool { return d.info.Place != tensor.Host }

// take charges seconds to a stream, or to the host if s is nil.
func (d *Device) take(s device.Stream, seconds float64) error {
	d.spent.Phases[d.clock.Current()] += seconds
	x, ok := s.(*stream)
	switch {
	case s == nil, !d.late():
		d.now += seconds
		d.ends = max(d.ends, d.now)
		return nil
	case !ok || x.d != d:
		return status.Errorf(status.InvalidArgument, "dryrun: a stream of another device")
	}
	x.at = max(x.at, d.now) + seconds
	d.ends = max(d.ends, x.at)
	return nil
}

type stream struct {
	d  *Device
	at float64 // when what it holds is done
}

type event struct {
	d  *Device
	at float64
}

func (d *Device) NewStream() (device.Stream, error) { return &stream{d: d}, nil }
func (d *Device) NewEvent() (device.Event, error)   { return &event{d: d}, nil }

func (s *stream) Sync() error {
	s.d.now = max(s.d.now, s.at)
	return nil
}

func (s *stream) Record(e device.Event) error {
	if x, ok := e.(*event); ok {
		x.at = max(s.at, s.d.now)
		return nil
	}
	return status.Errorf(status.InvalidArgument, "dryrun.Record: an event of another device")
}

func (s *stream) Wait(e device.Event) error {
	if x, ok := e.(*event); ok {
		s.at = max(s.at, x.at)
		return nil
	}
	return status.Errorf(status.InvalidArgument, "dryrun.Wait: an event of another device")
}

func (s *stream) Close() {}

func (e *event) Sync() error {
	e.d.now = max(e.d.now, e.at)
	return nil
}

func (e *event) Close() {}

// buffer is addresses of zeros, which may be read and take no memory until they are.
type buffer []byte

// Alloc finds addresses; there is no limit but theirs.
func (d *Device) Alloc(bytes int64) (device.Buffer, error) {
	b, err := syscall.Mmap(-1, 0, int(max(bytes, 1)), syscall.PROT_READ, syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	if err != nil {
		return nil, status.Errorf(status.OutOfMemory, "dryrun.Alloc: %d bytes of addresses: %w", bytes, err)
	}
	return buffer(b), nil
}

// AllocHost is Alloc.
func (d *Device) AllocHost(bytes int64) (device.Buffer, error) { return d.Alloc(bytes) }

func (b buffer) Pointer() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }
func (b buffer) Bytes() int64            { return int64(len(b)) }
func (b buffer) Free()                   { _ = syscall.Munmap(b) }

var _ device.Device = (*Device)(nil)
