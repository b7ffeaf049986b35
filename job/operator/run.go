package operator

import (
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/sp"
	"ulysses/tensor"
)

// Report describes an operator job that has run. Times and bytes are of this rank.
type Report struct {
	Input    string // names and shapes of the input tensors
	Plan     string // how the ranks share the work
	Levels   string // how all-to-alls are made, if that is a choice (comm.Mesh.SetLevels)
	Backward bool
	Bytes    int64   // of device memory
	Seconds  float64 // of the forward pass, and of the backward pass if there was one
	Sent     int64   // bytes of the all-to-alls, as counted
	Formula  int64   // the same, as planned
}

// run is what operator jobs of both kinds have in common. Its methods are collective and return an
// error on all ranks, except an error of compute, which may be of one rank.
type run struct {
	in     *inputFile
	dev    device.Device
	comm   comm.Comm // for tensors in host memory and in device memory
	ring   int64     // groups of the ring; only attention has one
	gather bool      // the ring gets all keys in one all-to-all
	clock  *clock.Clock
	batch  *sp.Batch
	stream device.Stream
	arena  *device.Arena
	block  []float32 // host memory for load
	report Report
	done   *Report // the report after the output was written, also if it has NaN or Inf
}

// operation is an operator job of one kind. Its methods are called in this order.
type operation interface {
	base() *run
	tokens() int64
	layout(a *device.Arena) error              // allocates all tensors
	scratch() (saved, workspace tensor.Tensor) // the tensors that are neither input nor result
	// reads this rank's tokens and refuses invalid values
	read() error
	compute() error
	sum() error // adds the ranks' terms of results that are whole on every rank
	results() []shardedTensor
	seesKey(token, head int64) bool // reports whether a query attends to any key
}

func (r *run) base() *run { return r }

func (r *run) sum() error { return nil }

func (r *run) seesKey(int64, int64) bool { return true }

// blockBytes is the number of bytes of a tensor that are copied at a time between file, host and
// device, unless one token has more.
const blockBytes = 4 << 20

// do runs a planned operation. free is the host memory that this rank may allocate; 0 = unknown. do
// calls leave before it frees the memory that other ranks may read.
func do(op operation, output string, free int64, leave func(error) error) (*Report, error) {
	r, panicked := op.base(), true
	defer func() {
		// After a panic the memory stays: other ranks may read it until Abort ends their processes
		// and this one.
		if !panicked {
			r.free()
		}
	}()
	err := r.run(op, output, free, leave)
	panicked = false
	return r.done, err
}

func (r *run) run(op operation, output string, free int64, leave func(error) error) (err error) {
	if err := comm.Agree(r.comm, r.allocate(op, free)); err != nil {
		return err
	}
	defer func() { err = leave(err) }()
	r.clock.Push("read")
	if err = r.touch(); err == nil {
		err = op.read()
	}
	err = comm.Agree(r.comm, err)
	r.clock.Pop()
	if err != nil {
		return err
	}
	r.clock.Push(r.in.kind)
	sent, start := comm.BytesSent(r.comm), time.Now()
	if err = op.compute(); err == nil {
		err = r.stream.Sync()
	}
	r.report.Seconds, r.report.Sent = time.Since(start).Seconds(), comm.BytesSent(r.comm)-sent
	r.clock.Pop()
	if err != nil {
		// The error is this rank's alone, and its peers wait in an all-to-all: the job must end.
		r.comm.Abort(status.Of(err), err.Error())
		return err
	}
	r.clock.Push("write")
	defer r.clock.Pop()
	if err := op.sum(); err != nil {
		r.comm.Abort(status.Of(err), err.Error())
		return err
	}
	check := &finiteCheck{seesKey: op.seesKey}
	metadata := map[string]string{"producer": "ulysses"}
	if err := writeSharded(r.comm, r.dev, r.stream, output, metadata, op.results(), check, blockBytes); err != nil {
		return err
	}
	r.done = &r.report
	return comm.Agree(r.comm, check.err(r.in.kind))
}

// allocate allocates all memory of the run at once. It returns an error if the device, or the host
// of a device that computes in host memory, has less. free is the host memory that this rank may
// allocate; 0 = unknown.
func (r *run) allocate(op operation, free int64) error {
	d := r.dev
	sketch := device.Sketch(d, r.in.kind)
	if err := op.layout(sketch); err != nil {
		return err
	}
	bytes, info := sketch.Peak(), d.Info()
	if all := info.Usable(); all > 0 && bytes > all {
		return status.Errorf(status.OutOfMemory,
			"%s: %s are planned on this rank, and its device has %s; start more ranks, so that each has fewer tokens and heads",
			r.in.kind, units.Bytes(bytes), units.Bytes(all))
	}
	if info.Place == tensor.Host && free > 0 && bytes > free {
		return status.Errorf(status.OutOfMemory,
			"%s: %s are planned on this rank, and the host has %s free for it; use more nodes", r.in.kind,
			units.Bytes(bytes), units.Bytes(free))
	}
	var err error
	if r.arena, err = device.NewArena(d, r.in.kind, bytes); err != nil {
		return status.Errorf(status.Of(err), "%w; start more ranks, so that each has fewer tokens and heads", err)
	}
	if err := op.layout(r.arena); err != nil {
		return err
	}
	r.report.Bytes = r.arena.Bytes()
	r.stream, err = d.NewStream()
	return err
}

// touch writes to all host memory of the run. The system gives a process its memory at the first
// write, which takes longer than many operations on it, and the measured time is without this.
func (r *run) touch() error {
	if r.arena.Place() != tensor.Host {
		return nil
	}
	return r.dev.Fill(r.stream, r.arena.All(), 0)
}

func (r *run) free() {
	if r.stream != nil {
		r.stream.Close()
	}
	if r.arena != nil {
		r.arena.Free()
	}
	r.in.close()
}

// load reads the elements of an entry of the file, from start on, into the dense tensor dst. It
// does nothing if dst is nil. invalid returns the fix for a value that must not occur; nil = every
// finite value may occur.
func (r *run) load(dst tensor.Tensor, e tensor.Entry, start int64, invalid func(float32) string) error {
	if dst.IsNil() {
		return nil
	}
	n := dst.Numel()
	if dst.Where == tensor.Host && dst.DType == tensor.F32 {
		return r.in.read(e, start, dst.Float32s(), invalid)
	}
	if r.block == nil {
		r.block = make([]float32, blockBytes/4)
	}
	for lo, flat := int64(0), dst.View(n); lo < n; lo += int64(len(r.block)) {
		hi := min(lo+int64(len(r.block)), n)
		values := r.block[:hi-lo]
		if err := r.in.read(e, start+lo, values, invalid); err != nil {
			return err
		}
		if err := r.dev.Copy(r.stream, flat.Slice(0, lo, hi), tensor.OfFloat32(values, hi-lo)); err != nil {
			return err
		}
		if err := r.stream.Sync(); err != nil { // block is used again
			return err
		}
	}
	return nil
}

// allocator allocates tensors in an arena, until an allocation fails.
type allocator struct {
	arena *device.Arena
	err   error
}

func (a *allocator) tensor(dtype tensor.DType, shape ...int64) (x tensor.Tensor) {
	if a.err == nil {
		x, a.err = a.arena.Tensor(dtype, shape...)
	}
	return x
}
