package main

import (
	"cmp"
	"fmt"
	"sync"
	"unsafe"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// context is one rank of one sequence-parallel group on one device. It owns its plans, batches and
// requests, and the memory that its calls use.
type context struct {
	mu            sync.Mutex // locked during a call
	handle        uintptr
	dev           device.Device
	comm          comm.Comm
	stream        device.Stream
	gpu           *gpu  // nil on the CPU
	deviceType    int32 // DLPack's number
	ordinal       int32
	ring          int64         // groups of the ring
	ownWorkspace  device.Buffer // for calls without a workspace; may be nil
	plans         map[*plan]bool
	batches       map[*batch]bool
	requests      []*request // in progress and free
	passes        []*pass    // in progress and free
	failed        error      // set by ulysses_context_abort
	closed        bool
	log           func(level int32, line string)
	recent        recentPasses // on a GPU, see saved.go
	recentSeeds   recentPasses // the passes with dropout, with their seeds
	ownWorkspaces bool         // ULYSSES_OWN_WORKSPACES: reserve nothing
	noAgreement   bool         // ULYSSES_NO_AGREEMENT

	// Data of the current call. It is here so that no call allocates.
	agreement     agreement
	admit         func(error) error // agree as a function value, for the fields Admit of sp and gdn
	operands      []operand
	saved         savedMemory
	args          sp.Args
	options       optionTensors
	grads         sp.Grads
	gdnArgs       gdn.Args
	gdnGrads      gdn.Grads
	gdnLayer      gdn.LayerArgs
	gdnLayerGrads gdn.LayerGrads
	reshard       sp.Reshard
	seq           [maxReshard]tensor.Tensor
	heads         [maxReshard]tensor.Tensor
	shared        [maxReshard]bool
	shapesOnly    bool // tensors need no data: the call is a query for sizes
	local         localTensors
	layer         layerTensors
	overlap       sp.Overlap // of a layer
	halo          halo
	loss          []float64 // sum and count; allocated on its own, so that C may read it
}

// enter begins a call on the context. It fails if another thread or a callback is in a call.
func (c *context) enter(op string) error {
	if !c.mu.TryLock() {
		return invalid("%s: the context is already in a call, of another thread or of the call around this callback; make one call at a time",
			op)
	}
	err := c.failed
	if c.closed {
		err = invalid("%s: the context was destroyed; create another", op)
	}
	if err != nil {
		c.mu.Unlock()
		return err
	}
	c.operands, c.saved = c.operands[:0], savedMemory{}
	c.agreement.op, c.agreement.done, c.agreement.n = op, false, 0
	c.gpu.enter()
	return nil
}

// leave ends a call that enter began.
func (c *context) leave() {
	c.gpu.leave()
	c.mu.Unlock()
}

// settings are checked options.
type settings struct {
	gpu           bool
	ordinal       int32
	threads       int
	ulysses, ring int32
	comm          int32
	hasAlltoallv  bool // the communicator can send tensors in host memory
	flags         int32
	log           func(level int32, line string)
}

// readOptions reads and checks the options of a context. NULL = all defaults.
func readOptions(op string, p unsafe.Pointer) (s settings, err error) {
	var o cOptions
	if p != nil {
		if o, err = readStruct[cOptions](op, "options", p); err != nil {
			return s, err
		}
	}
	switch {
	case o.device != 0 && o.device != onCPU && o.device != onCUDA:
		return s, invalid("%s: device is %d; use ULYSSES_CPU or ULYSSES_CUDA", op, o.device)
	case o.device != onCUDA && o.ordinal != 0:
		return s, invalid("%s: ordinal is %d; leave it 0 on the CPU", op, o.ordinal)
	case o.ordinal < 0 || o.ordinal > 1<<16:
		return s, invalid("%s: ordinal is %d; give a number from 0", op, o.ordinal)
	case o.device == onCUDA && o.threads != 0:
		return s, invalid("%s: threads is %d; leave it 0 on CUDA, where it has no effect", op, o.threads)
	case o.threads < 0 || o.threads > 4096:
		return s, invalid("%s: threads is %d; give 1 to 4096, or 0 for the cores of the affinity mask", op, o.threads)
	case o.ring < 0 || o.ulysses < 0:
		return s, invalid("%s: ulysses is %d and ring %d; give 0 or more", op, o.ulysses, o.ring)
	case o.comm < 0 || o.comm > 3:
		return s, invalid("%s: comm is %d; use ULYSSES_COMM_AUTO, HOST, NCCL or IPC", op, o.comm)
	case o.comm >= 2 && o.device != onCUDA:
		return s, unsupported(
			"%s: comm is %d (NCCL or IPC), which needs ULYSSES_CUDA; use ULYSSES_COMM_AUTO on the CPU", op, o.comm)
	case o.timeout != 0:
		return s, unsupported("%s: timeout %d: %s", op, o.timeout, notbuilt.Timeouts.Text(notbuilt.Timeouts.Instead))
	case o.nccl_comm != nil:
		return s, unsupported("%s: nccl_comm: %s", op, notbuilt.SharedNCCL.Text(notbuilt.SharedNCCL.Instead))
	case o.flags&^(flagOwnWorkspaces|flagNoAgreement) != 0 || o.reserved != 0:
		return s, invalid(
			"%s: flags is %#x and reserved %d; the flags are ULYSSES_OWN_WORKSPACES and ULYSSES_NO_AGREEMENT, reserved is 0",
			op, o.flags, o.reserved)
	}
	s = settings{gpu: o.device == onCUDA, ordinal: o.ordinal, threads: int(o.threads), ulysses: o.ulysses,
		ring: max(1, o.ring), comm: o.comm, flags: o.flags}
	if f := o.log; f != nil {
		user := o.log_user
		s.log = func(level int32, line string) { callLog(f, user, level, line) }
	}
	return s, nil
}

// newLocal creates a context of one rank.
func newLocal(opts, out unsafe.Pointer) error {
	const op = "ulysses_context_create_local"
	if err := clearOut(op, out); err != nil {
		return err
	}
	s, err := readOptions(op, opts)
	if err != nil {
		return err
	}
	return newContext(op, s, comm.Local(1)[0], out)
}

// newContext creates a context on a communicator and owns the communicator, also if it fails. The
// ranks have agreed on errors in their own arguments before. Collective.
func newContext(op string, s settings, c comm.Comm, out unsafe.Pointer) (err error) {
	x := &context{comm: c, deviceType: onCPU, plans: map[*plan]bool{}, batches: map[*batch]bool{},
		log: s.log, operands: make([]operand, 0, 64),
		loss: make([]float64, 2), agreement: newAgreement(c.Size()), ownWorkspaces: s.flags&flagOwnWorkspaces != 0,
		noAgreement: s.flags&flagNoAgreement != 0}
	x.admit = func(err error) error { return x.agree(x.explainSaved(err)) }
	defer func() {
		if err != nil {
			x.release()
		}
		x.gpu.leave()
	}()
	if err := comm.Same(c, op,
		append(intFields(namedInt{"ulysses", int64(s.ulysses)}, namedInt{"ring", int64(s.ring)},
			namedInt{"comm", int64(s.comm)}, namedInt{"flags", int64(s.flags)}),
			comm.Field{Name: "device", Value: map[bool]string{false: "CPU", true: "CUDA"}[s.gpu]})...); err != nil {
		return err
	}
	if n := int64(c.Size()); s.ulysses != 0 && int64(s.ulysses)*int64(s.ring) != n {
		return invalid("%s: ulysses is %d and ring %d on %d ranks; their product must be the number of ranks, or ulysses 0",
			op, s.ulysses, s.ring, n)
	} else if n%int64(s.ring) != 0 {
		return invalid("%s: ring is %d on %d ranks; it must divide the number of ranks", op, s.ring, n)
	}
	x.ring = int64(s.ring)
	if !s.gpu {
		n, err := shareOfCores(op, c)
		if err != nil {
			return err
		}
		s.threads = cmp.Or(s.threads, n)
	}
	if err = comm.Agree(c, x.open(op, &s)); err != nil {
		return err
	}
	if err = x.openComm(op, s); err != nil {
		return err
	}
	if err = x.checkTransport(op, s); err == nil {
		x.handle, err = register(contextKind, x)
	}
	if err = comm.Agree(c, err); err != nil {
		if x.handle != 0 {
			unregister(x.handle)
		}
		return err
	}
	x.local.c = newCallbackArgs()
	x.logLine(fmt.Sprintf(`{"event":"context","rank":%d,"size":%d,"comm":%q,"device":%q,"kernels":%q,"threads":%d}`,
		c.Rank(), c.Size(), x.comm.Kind(), x.dev.Info().Name, x.dev.Info().Kernels, s.threads))
	*(*uintptr)(out) = x.handle
	return nil
}

// checkTransport refuses settings that the transport of tensors does not support.
func (c *context) checkTransport(op string, s settings) error {
	if c.ownMemoryOnly() && c.ownWorkspaces {
		return invalid("%s: ULYSSES_OWN_WORKSPACES is set, and ULYSSES_COMM_IPC sends from the context's own memory only; do not set the flag, or set comm to ULYSSES_COMM_NCCL or ULYSSES_COMM_HOST",
			op)
	}
	if c.comm.Size() > 1 && c.transport() == transportHost && !s.hasAlltoallv {
		return invalid("%s: alltoallv is NULL, and it is needed for tensors on the CPU and for ULYSSES_COMM_HOST; set it, or use NCCL or IPC on CUDA",
			op)
	}
	return nil
}

// open opens the device and creates the context's stream.
func (c *context) open(op string, s *settings) (err error) {
	if s.gpu {
		err = c.openGPU(op, *s)
	} else {
		c.dev, _, err = backends.Open(backends.Choice{Backend: "cpu", Threads: s.threads})
	}
	if err == nil {
		c.stream, err = c.dev.NewStream()
	}
	return err
}

// logLine passes a JSON object to the host's log.
func (c *context) logLine(line string) {
	if c.log != nil {
		c.log(0, line)
	}
}

// reserve makes the context's own workspace at least this large. With ULYSSES_OWN_WORKSPACES it
// does nothing.
func (c *context) reserve(bytes int64) error {
	if c.ownWorkspace != nil && c.ownWorkspace.Bytes() >= bytes || bytes == 0 || c.ownWorkspaces {
		return nil
	}
	if c.ownMemoryOnly() && c.ownWorkspace != nil {
		// the old buffer is kept, so doubling limits the total
		bytes = max(bytes, 2*c.ownWorkspace.Bytes())
	}
	b, err := c.dev.Alloc(bytes)
	if err != nil {
		return status.Errorf(status.Of(err),
			"libulysses: cannot allocate the context's own workspace: %w, or set ULYSSES_OWN_WORKSPACES and give each call its workspace",
			err)
	}
	if c.ownWorkspace != nil && c.ownMemoryOnly() {
		c.gpu.retired = append(c.gpu.retired, c.ownWorkspace)
	} else if c.ownWorkspace != nil {
		c.ownWorkspace.Free()
	}
	c.ownWorkspace = b
	return nil
}

// workspace returns the caller's workspace. If p is NULL, it returns the context's own, which it
// grows to need bytes. For attention and the gated delta rule, need is 0: plans and batches have
// reserved this memory.
func (c *context) workspace(op string, p unsafe.Pointer, bytes uint64, need int64) (t tensor.Tensor, err error) {
	if p != nil || bytes > 0 {
		if t, err = c.rawMemory(op, "workspace", p, bytes); err != nil || !c.ownMemoryOnly() {
			return t, err
		}
	} else if c.ownWorkspaces && need > 0 {
		return t, noWorkspace(op, need)
	}
	if err := c.reserve(need); err != nil || c.ownWorkspace == nil {
		return t, err
	}
	return c.byteTensor(c.ownWorkspace.Pointer(), c.ownWorkspace.Bytes()), nil
}

// noWorkspace returns the error for a NULL workspace with ULYSSES_OWN_WORKSPACES.
func noWorkspace(op string, need int64) error {
	return invalid("%s: workspace is NULL and the context was created with ULYSSES_OWN_WORKSPACES; give %d bytes",
		op, need)
}

// inContext runs the body of a call on a context that is not collective.
func inContext(op string, h uintptr, body func(c *context) error) error {
	c, err := find[context](op, contextKind, h)
	if err != nil {
		return err
	}
	if err := c.enter(op); err != nil {
		return err
	}
	defer c.leave()
	return body(c)
}

func contextQuery(h uintptr, out unsafe.Pointer) error {
	const op = "ulysses_context_query"
	return inContext(op, h, func(c *context) error {
		return writeStruct(op, "out", out,
			&cContextInfo{rank: int32(c.comm.Rank()), size: int32(c.comm.Size()),
				ulysses: int32(int64(c.comm.Size()) / c.ring), ring: int32(c.ring), device: c.deviceType,
				ordinal: c.ordinal, comm: c.transport()})
	})
}

func contextError(h uintptr) error {
	return inContext("ulysses_context_async_error", h, (*context).asyncError)
}

// contextAbort makes the later calls of this rank fail, and the calls of its peers if the
// communicator can reach them.
func contextAbort(h uintptr, why int32) error {
	const op = "ulysses_context_abort"
	return inContext(op, h, func(c *context) error {
		code := status.Code(why)
		if code == status.OK {
			code = status.Internal
		}
		c.failed = status.Errorf(code, "%s was called with status %d (%v); destroy the context", op, why,
			status.Code(why))
		c.comm.Abort(code, op)
		return nil
	})
}

// contextDestroy destroys a context with its plans, batches and requests. On a thread on which MPI
// forbids calls, it returns an error and leaves the context as it is, so that the host can destroy
// it on the right thread. Collective.
func contextDestroy(h uintptr) error {
	const op = "ulysses_context_destroy"
	if h == 0 {
		return nil
	}
	c, err := find[context](op, contextKind, h)
	if err != nil {
		return err
	}
	if err := c.enter(op); err != nil {
		// an aborted context refuses all other calls
		if c.failed == nil || !c.mu.TryLock() {
			return err
		}
		c.gpu.enter()
	}
	defer c.leave()
	if err := comm.Forbidden(c.comm, op); err != nil {
		return err
	}
	c.closed = true
	ended := c.endInProgress()
	for p := range c.plans {
		p.release()
	}
	for b := range c.batches {
		b.release()
	}
	unregister(c.handle)
	freeCallbackArgs(c.local.c)
	return cmp.Or(ended, c.release())
}

// endInProgress waits for what the requests and passes in progress send and receive, and releases
// them. Otherwise MPI would read and write their memory after the host has freed it. After an abort
// it does not wait, because peers may have left. It returns the first error. Collective.
func (c *context) endInProgress() (err error) {
	for _, r := range c.requests {
		if r.handle != 0 && c.failed == nil {
			err = cmp.Or(err, r.pending.Cancel())
		}
		r.release()
	}
	for _, x := range c.passes {
		if x.handle != 0 && c.failed == nil {
			err = cmp.Or(err, x.overlap.Cancel())
		}
		x.release()
	}
	return err
}
