package main

import (
	"fmt"
	"strconv"
	"sync"
	"unsafe"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/slurm"
	"ulysses/sp"
	"ulysses/tensor"
)

// context is one rank of one sequence group on one device.
type context struct {
	mu       sync.Mutex // held during a call
	self     uintptr
	dev      device.Device
	comm     comm.Comm
	stream   device.Stream
	gpu      *gpu  // nil on the CPU
	place    int32 // DLPack's device
	ordinal  int32
	own      device.Buffer // workspace of calls that bring none
	plans    map[*plan]bool
	batches  map[*batch]bool
	requests []*request // free and under way
	failed   error      // after abort
	closed   bool
	log      func(level int32, line string)
	kept     map[identity]bool // on a GPU: of which plans and batches forward calls have saved
	hostOwns bool              // ULYSSES_OWN_WORKSPACES: nothing is reserved
	unagreed bool              // ULYSSES_NO_AGREEMENT: ranks do not agree on calls

	// Of the call under way, kept here so that no call allocates.
	ballot     ballot
	admit      func(error) error // agree as a function value, for the fields Admit
	seen       []seen
	saving     saving
	args       sp.Args
	grads      sp.Grads
	gdnArgs    gdn.Args
	gdnGrads   gdn.Grads
	reshard    sp.Reshard
	seq        [maxReshard]tensor.Tensor
	heads      [maxReshard]tensor.Tensor
	shared     [maxReshard]bool
	shapesOnly bool // tensors need no data: a query of sizes
	local      localPlaces
	layer      layerPlaces
	halo       halo
	loss       []float64 // of its own, so that C may look at it
}

// enter begins a call. A context serves one thread at a time, and no callback may call in.
func (c *context) enter(op string) error {
	if !c.mu.TryLock() {
		return invalid("%s: the context is in a call already, of another thread or around a callback: one at a time", op)
	}
	err := c.failed
	if c.closed {
		err = invalid("%s: the context was destroyed", op)
	}
	if err != nil {
		c.mu.Unlock()
		return err
	}
	c.seen, c.saving = c.seen[:0], saving{}
	c.ballot.op, c.ballot.cast, c.ballot.n = op, false, 0
	c.gpu.enter()
	return nil
}

func (c *context) leave() {
	c.gpu.leave()
	c.mu.Unlock()
}

// settings are options that were checked.
type settings struct {
	gpu           bool
	ordinal       int32
	threads       int
	ulysses, ring int32
	comm          int32
	exchanges     bool // what the context stands on carries tensors in memory of the host
	flags         int32
	log           func(level int32, line string)
}

// options checks what a context is to be. NULL is all defaults.
func options(op string, p unsafe.Pointer) (s settings, err error) {
	var o cOptions
	if p != nil {
		if o, err = read[cOptions](op, "options", p); err != nil {
			return s, err
		}
	}
	switch {
	case o.device != 0 && o.device != onCPU && o.device != onCUDA:
		return s, invalid("%s: device %d: use ULYSSES_CPU or ULYSSES_CUDA", op, o.device)
	case o.device != onCUDA && o.ordinal != 0:
		return s, invalid("%s: ordinal %d: the CPU has 0 alone", op, o.ordinal)
	case o.ordinal < 0 || o.ordinal > 1<<16:
		return s, invalid("%s: ordinal %d: GPUs are counted from 0", op, o.ordinal)
	case o.device == onCUDA && o.threads != 0:
		return s, invalid("%s: threads %d: they are the CPU's: leave it 0 on CUDA", op, o.threads)
	case o.threads < 0 || o.threads > 4096:
		return s, invalid("%s: threads %d: 1 to 4096, or 0 for the cores of the mask", op, o.threads)
	case o.ring < 0 || o.ulysses < 0:
		return s, invalid("%s: ulysses %d, ring %d: 0 or more", op, o.ulysses, o.ring)
	case o.ring > 1:
		return s, unbuilt("%s: ring %d: %s", op, o.ring, notbuilt.Ring.Text("use ring 1"))
	case o.comm < 0 || o.comm > 3:
		return s, invalid("%s: comm %d: use ULYSSES_COMM_AUTO, HOST, NCCL or IPC", op, o.comm)
	case o.comm >= 2 && o.device != onCUDA:
		return s, unbuilt("%s: comm %d (NCCL, IPC) on the CPU: use ULYSSES_COMM_AUTO", op, o.comm)
	case o.timeout != 0:
		return s, unbuilt("%s: timeout %d: %s", op, o.timeout, notbuilt.Timeouts.Text(notbuilt.Timeouts.Instead))
	case o.nccl_comm != nil:
		return s, unbuilt("%s: nccl_comm: %s", op, notbuilt.SharedNCCL.Text(notbuilt.SharedNCCL.Instead))
	case o.flags&^(flagOwnWorkspaces|flagNoAgreement) != 0 || o.reserved != 0:
		return s, invalid("%s: flags %#x, reserved %d: use ULYSSES_OWN_WORKSPACES and ULYSSES_NO_AGREEMENT, and 0", op, o.flags, o.reserved)
	}
	s = settings{gpu: o.device == onCUDA, ordinal: o.ordinal, threads: int(o.threads), ulysses: o.ulysses, ring: max(1, o.ring), comm: o.comm, flags: o.flags}
	if f := o.log; f != nil {
		user := o.log_user
		s.log = func(level int32, line string) { callLog(unsafe.Pointer(f), user, level, line) }
	}
	return s, nil
}

// newLocal makes a context of one rank.
func newLocal(opts, out unsafe.Pointer) error {
	const op = "ulysses_context_create_local"
	if out == nil {
		return invalid("%s: out is NULL", op)
	}
	*(*uintptr)(out) = 0
	s, err := options(op, opts)
	if err != nil {
		return err
	}
	return newContext(op, s, comm.Local(1)[0], out)
}

// newContext makes a context on a communicator, which it then owns. All ranks call it with what
// each found about its own arguments agreed on before.
func newContext(op string, s settings, c comm.Comm, out unsafe.Pointer) (err error) {
	x := &context{comm: c, place: onCPU, plans: map[*plan]bool{}, batches: map[*batch]bool{}, kept: map[identity]bool{}, log: s.log, seen: make([]seen, 0, 64), loss: make([]float64, 2), ballot: newBallot(c.Size()),
		hostOwns: s.flags&flagOwnWorkspaces != 0, unagreed: s.flags&flagNoAgreement != 0}
	x.admit = func(err error) error { return x.agree(x.explain(err)) }
	defer func() {
		if err != nil {
			x.end()
		}
		x.gpu.leave()
	}()
	number := func(n int32) string { return strconv.Itoa(int(n)) }
	if err := comm.Same(c, op, comm.Field{Name: "ulysses", Value: number(s.ulysses)}, comm.Field{Name: "ring", Value: number(s.ring)}, comm.Field{Name: "comm", Value: number(s.comm)}, comm.Field{Name: "flags", Value: number(s.flags)},
		comm.Field{Name: "device", Value: map[bool]string{false: "CPU", true: "CUDA"}[s.gpu]}); err != nil {
		return err
	}
	if n := int32(c.Size()); s.ulysses != 0 && s.ulysses*s.ring != n {
		return invalid("%s: ulysses %d, ring %d and %d ranks: their product must be the ranks, or ulysses 0", op, s.ulysses, s.ring, n)
	}
	if err = comm.Agree(c, x.open(op, &s)); err != nil {
		return err
	}
	if err = x.openComm(op, s); err != nil {
		return err
	}
	if c.Size() > 1 && x.way() == wayHost && !s.exchanges {
		err = invalid("%s: alltoallv is NULL: it carries tensors on the CPU, and those of a GPU that are staged through host memory: give one, or use NCCL or IPC on CUDA", op)
	}
	if x.maps() && x.hostOwns {
		err = invalid("%s: ULYSSES_OWN_WORKSPACES: ULYSSES_COMM_IPC exchanges in the context's own memory alone: leave the flag, or set comm to ULYSSES_COMM_NCCL or ULYSSES_COMM_HOST", op)
	}
	if err == nil {
		x.self, err = register(aContext, x)
	}
	if err = comm.Agree(c, err); err != nil {
		if x.self != 0 {
			forget(x.self)
		}
		return err
	}
	x.local.c = newLocalC()
	x.say(fmt.Sprintf(`{"event":"context","rank":%d,"size":%d,"comm":%q,"device":%q,"kernels":%q,"threads":%d}`,
		c.Rank(), c.Size(), x.comm.Kind(), x.dev.Info().Name, x.dev.Info().Kernels, s.threads))
	*(*uintptr)(out) = x.self
	return nil
}

// open opens the device.
func (c *context) open(op string, s *settings) (err error) {
	if s.gpu {
		err = c.openGPU(op, *s)
	} else {
		if s.threads == 0 {
			s.threads = max(1, cores()/max(1, slurm.Env().LocalSize))
		}
		c.dev, _, err = backends.Open(backends.Choice{Backend: "cpu", Threads: s.threads})
	}
	if err == nil {
		c.stream, err = c.dev.NewStream()
	}
	return err
}

func (c *context) say(line string) {
	if c.log != nil {
		c.log(0, line)
	}
}

// reserve grows the context's own workspace to at least this size. If the host brings all
// workspaces, reserve does nothing.
func (c *context) reserve(bytes int64) error {
	if c.own != nil && c.own.Bytes() >= bytes || bytes == 0 || c.hostOwns {
		return nil
	}
	if c.maps() && c.own != nil {
		bytes = max(bytes, 2*c.own.Bytes()) // the old one is kept
	}
	b, err := c.dev.Alloc(bytes)
	if err != nil {
		return status.Errorf(status.Of(err), "libulysses: the context's own workspace: %w: give a workspace of your own, or smaller batches", err)
	}
	if c.own != nil && c.maps() {
		c.gpu.retired = append(c.gpu.retired, c.own)
	} else if c.own != nil {
		c.own.Free()
	}
	c.own = b
	return nil
}

// workspace returns the caller's workspace. If the caller gives none, it returns the context's own,
// and grows it if necessary. Plans and batches have reserved memory for attention and the gated
// delta rule, which pass 0 for the growth.
func (c *context) workspace(op string, p unsafe.Pointer, bytes uint64, need int64) (t tensor.Tensor, err error) {
	if p != nil || bytes > 0 {
		if t, err = c.block(op, "workspace", p, bytes); err != nil || !c.maps() {
			return t, err
		}
	} else if c.hostOwns && need > 0 {
		return t, c.noWorkspace(op, need)
	}
	if err := c.reserve(need); err != nil || c.own == nil {
		return t, err
	}
	return c.bytes(c.own.Pointer(), c.own.Bytes()), nil
}

// noWorkspace returns the error for a workspace that the host must bring and has not brought.
func (c *context) noWorkspace(op string, need int64) error {
	return invalid("%s: workspace is NULL and the context was made with ULYSSES_OWN_WORKSPACES: give %d bytes", op, need)
}

func contextQuery(h uintptr, out unsafe.Pointer) error {
	const op = "ulysses_context_query"
	c, err := find[context](op, aContext, h)
	if err != nil {
		return err
	}
	if err := c.enter(op); err != nil {
		return err
	}
	defer c.leave()

	return write(op, "out", out, &cContextInfo{rank: int32(c.comm.Rank()), size: int32(c.comm.Size()), ulysses: int32(c.comm.Size()), ring: 1,
		device: c.place, ordinal: c.ordinal, comm: c.way()})
}

func contextError(h uintptr) error {
	c, err := find[context]("ulysses_context_async_error", aContext, h)
	if err != nil {
		return err
	}
	if err := c.enter("ulysses_context_async_error"); err != nil {
		return err
	}
	defer c.leave()
	return c.lateError()
}

// contextAbort makes this rank's later calls fail, and its peers' where the communicator reaches
// them.
func contextAbort(h uintptr, why int32) error {
	const op = "ulysses_context_abort"
	c, err := find[context](op, aContext, h)
	if err != nil {
		return err
	}
	if err := c.enter(op); err != nil {
		return err
	}
	defer c.leave()
	code := status.Code(why)
	if code == status.OK {
		code = status.Internal
	}
	c.failed = status.Errorf(code, "the context was aborted by its host with status %d (%v): destroy it", why, status.Code(why))
	c.comm.Abort(code, "ulysses_context_abort")
	return nil
}

// contextDestroy ends a context and what was made on it.
func contextDestroy(h uintptr) error {
	const op = "ulysses_context_destroy"
	if h == 0 {
		return nil
	}
	c, err := find[context](op, aContext, h)
	if err != nil {
		return err
	}
	if err := c.enter(op); err != nil && c.failed == nil {
		return err
	} else if err != nil && !c.mu.TryLock() {
		return err
	} else if err != nil {
		c.gpu.enter()
	}
	defer c.leave()
	c.closed = true
	for _, r := range c.requests {
		r.end()
	}
	for p := range c.plans {
		p.end()
	}
	for b := range c.batches {
		b.end()
	}
	forget(c.self)
	freeLocalC(c.local.c)
	return c.end()
}
