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

// Device is a device.Device that executes no operation and adds up time. It describes itself by the
// device.Info that Open is given. If that device has host memory, an operation ends before the call
// returns; otherwise it is enqueued. A Device serves one goroutine.
type Device struct {
	Sizes
	device.Calls
	info          device.Info
	rates         Rates
	clock         *clock.Clock
	now           float64 // seconds on the host's clock
	ends          float64 // seconds on the same clock at which the last enqueued operation ends
	node, network link    // inside the node, and to other nodes
	spent         Account
}

// link is a link of a rank. Two queues share it: that of the sequence axis, which has a
// communication stream of its own, and that of all other communication. Transfers of one queue
// follow one another. If both queues have a transfer, each of them has half the rate.
type link struct {
	free [2]float64 // seconds on the host's clock at which the last transfer of each queue ends
}

// start returns when a transfer of a queue can start at the earliest.
func (l *link) start(queue int, at float64) float64 { return max(at, l.free[queue]) }

// occupy adds a transfer that starts at a time and takes seconds of the link. It returns by how
// much the transfers of the other queue delay it. Those are delayed as much. Streams that have
// passed their planned end are not; the delay counts for later transfers and for the total time.
func (l *link) occupy(queue int, at, seconds float64) (delay float64) {
	other := &l.free[1-queue]
	delay = min(seconds, max(0, *other-at))
	*other += delay
	l.free[queue] = at + seconds + delay
	return delay
}

// Account is the time and the traffic of the operations so far.
type Account struct {
	Seconds float64 // from the first operation to the end of the last
	// seconds of operations and communication, by the clock's phase; operations that overlap count
	// in full
	Phases map[string]float64
	Waits  map[string]int64 // communications, in which a rank may wait for others, by phase
	// bytes that streams send to ranks of the same node, and to ranks of other nodes
	Node, Network int64
}

// Open returns a Device. The time of an operation is charged to the phase that c is in when the
// operation is called; c may be nil. Open returns an error if a rate is missing (Rates.Check).
func Open(info device.Info, sizes Sizes, rates Rates, c *clock.Clock) (*Device, error) {
	if err := rates.Check(); err != nil {
		return nil, err
	}
	d := &Device{Sizes: sizes, info: info, rates: rates, clock: c,
		spent: Account{Phases: map[string]float64{}, Waits: map[string]int64{}}}
	d.Calls = device.NewCalls(d.enqueue)
	return d, nil
}

// Assumes reports that the device computes nothing, so that values which decide what is done, such
// as the choices of experts, are assumed.
func (d *Device) Assumes() bool { return true }

// Info returns the description that Open was given.
func (d *Device) Info() device.Info { return d.info }
func (d *Device) Close()            {}

// Spent returns the account after all operations have ended.
func (d *Device) Spent() Account {
	d.now = max(d.now, d.ends)
	for _, l := range []*link{&d.node, &d.network} {
		d.now = max(d.now, l.free[0], l.free[1])
	}
	x := d.spent
	x.Seconds, x.Phases, x.Waits = d.now, maps.Clone(d.spent.Phases), maps.Clone(d.spent.Waits)
	return x
}

// Plus returns x plus y multiplied by times.
func (x Account) Plus(y Account, times int64) Account {
	n := float64(times)
	sum := Account{x.Seconds + n*y.Seconds, maps.Clone(x.Phases), maps.Clone(x.Waits), x.Node + times*y.Node,
		x.Network + times*y.Network}
	for name, meetings := range y.Waits {
		sum.Waits[name] += times * meetings
	}
	for name, seconds := range y.Phases {
		sum.Phases[name] += n * seconds
	}
	return sum
}

// asynchronous reports whether operations return before they end.
func (d *Device) asynchronous() bool { return d.info.Place != tensor.Host }

// charge adds seconds to a stream, or to the host if s is nil, and to the current phase.
func (d *Device) charge(s device.Stream, seconds float64) error {
	d.spent.Phases[d.clock.Current()] += seconds
	x, ok := s.(*stream)
	switch {
	case s == nil, !d.asynchronous():
		d.now += seconds
		d.ends = max(d.ends, d.now)
		return nil
	case !ok || x.d != d:
		return status.Errorf(status.InvalidArgument,
			"dryrun: the stream is one of another device (%T); use this device's NewStream", s)
	}
	x.at = max(x.at, d.now) + seconds
	d.ends = max(d.ends, x.at)
	return nil
}

type stream struct {
	d  *Device
	at float64 // seconds on the host's clock at which its operations end
}

// transfer makes the stream wait until the links of its next communication are free for a queue,
// and then occupies them: the link inside the node for node seconds, the link to other nodes for
// network seconds.
func (s *stream) transfer(queue int, node, network float64) {
	d := s.d
	if !d.asynchronous() { // operations follow one another anyway
		return
	}
	s.at = max(s.at, d.now)
	if node > 0 {
		s.at = d.node.start(queue, s.at)
	}
	if network > 0 {
		s.at = d.network.start(queue, s.at)
	}
	began := s.at
	if node > 0 {
		s.at = max(s.at, began+d.node.occupy(queue, began, node))
	}
	if network > 0 {
		s.at = max(s.at, began+d.network.occupy(queue, began, network))
	}
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
	return status.Errorf(status.InvalidArgument,
		"dryrun.Record: the event is one of another device (%T); use this device's NewEvent", e)
}

func (s *stream) Wait(e device.Event) error {
	if x, ok := e.(*event); ok {
		s.at = max(s.at, x.at)
		return nil
	}
	return status.Errorf(status.InvalidArgument,
		"dryrun.Wait: the event is one of another device (%T); use this device's NewEvent", e)
}

func (s *stream) Close() {}

func (e *event) Sync() error {
	e.d.now = max(e.d.now, e.at)
	return nil
}

func (e *event) Close() {}

// buffer is a range of addresses that reads as zeros. It occupies no physical memory until it is
// read, and it cannot be written.
type buffer []byte

// Alloc reserves addresses. Only the address space limits the size.
func (d *Device) Alloc(bytes int64) (device.Buffer, error) {
	b, err := syscall.Mmap(-1, 0, int(max(bytes, 1)), syscall.PROT_READ,
		syscall.MAP_PRIVATE|syscall.MAP_ANON|syscall.MAP_NORESERVE)
	if err != nil {
		return nil, status.Errorf(status.OutOfMemory,
			"dryrun.Alloc: %d bytes of address space: %w; raise the limit of virtual memory (ulimit -v)", bytes, err)
	}
	return buffer(b), nil
}

// AllocHost is Alloc.
func (d *Device) AllocHost(bytes int64) (device.Buffer, error) { return d.Alloc(bytes) }

func (b buffer) Pointer() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }
func (b buffer) Bytes() int64            { return int64(len(b)) }
func (b buffer) Free()                   { _ = syscall.Munmap(b) }

var _ device.Device = (*Device)(nil)
