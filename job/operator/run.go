package operator

import (
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Report is what an operator job did, for the table at its end. Times and bytes are
// this rank's.
type Report struct {
	Input    string // shapes, as read
	Plan     string // how heads or states are shared
	Backward bool
	Bytes    int64   // of device memory
	Seconds  float64 // forward, and backward if there was one
	Sent     int64   // by the all-to-alls of the passes, as counted
	Formula  int64   // as the plan has it
}

// run is an operator job under way. The communicator serves tensors of the host and of
// the device. Every rank reads its own rows; rank 0 writes the output, whole or not at all. What is
// here is collective and fails on all ranks alike.
type run struct {
	in     *inputFile
	dev    device.Device
	comm   comm.Comm
	clock  *clock.Clock
	stream device.Stream
	arena  *device.Arena
	piece  []float32
	report Report
	// the report, once the output is written; it may hold what is NaN or Inf
	done *Report
}

// operation is what one kind of job does in a run, each in turn.
type operation interface {
	base() *run
	tokens() int64
	layout(a *device.Arena) error              // takes all memory of the run
	scratch() (saved, workspace tensor.Tensor) // of that memory, what is neither input nor result
	// fills this rank's rows and refuses numbers that cannot be
	read() error
	compute() error
	results() []sharded
	sees(token int64) bool // whether a query sees a key
}

func (r *run) base() *run { return r }

func (r *run) sees(int64) bool { return true }

// pieceBytes is how much of a tensor travels at a time between files, hosts and devices, if that is
// a row or more.
const pieceBytes = 4 << 20

// do does the work once the plan stands; it calls leave at the end, before the memory that was
// exchanged is given back.
func do(k operation, output string, leave func(error) error) (*Report, error) {
	r, panicked := k.base(), true
	defer func() {
		// else peers may be reading what they have mapped of it, until the Abort that comes ends
		// them, and it
		if !panicked {
			r.free()
		}
	}()
	err := r.run(k, output, leave)
	panicked = false
	return r.done, err
}

func (r *run) run(k operation, output string, leave func(error) error) (err error) {
	if err := comm.Agree(r.comm, r.allocate(k)); err != nil {
		return err
	}
	defer func() { err = leave(err) }()
	r.clock.Push("read")
	err = comm.Agree(r.comm, k.read())
	r.clock.Pop()
	if err != nil {
		return err
	}
	r.clock.Push(r.in.kind)
	sent, start := comm.BytesSent(r.comm), time.Now()
	if err = k.compute(); err == nil {
		err = r.stream.Sync()
	}
	r.report.Seconds, r.report.Sent = time.Since(start).Seconds(), comm.BytesSent(r.comm)-sent
	r.clock.Pop()
	if err != nil {
		// A rank that fails here fails alone, so it ends the job: its peers are waiting in an
		// exchange.
		r.comm.Abort(status.Of(err), err.Error())
		return err
	}
	r.clock.Push("write")
	defer r.clock.Pop()
	results := &finite{sees: k.sees}
	if err := writeSharded(r.comm, r.dev, r.stream, output, map[string]string{"producer": "ulysses"}, k.results(), results, pieceBytes); err != nil {
		return err
	}
	r.done = &r.report
	return comm.Agree(r.comm, results.err(r.in.kind))
}

// allocate takes all memory of the run at once.
func (r *run) allocate(k operation) error {
	d := r.dev
	sketch := device.Sketch(d, r.in.kind)
	if err := k.layout(sketch); err != nil {
		return err
	}
	var err error
	if r.arena, err = device.NewArena(d, r.in.kind, sketch.Peak()); err != nil {
		return status.Errorf(status.Of(err), "%w: use more ranks, so that each holds fewer rows and heads", err)
	}
	if err := k.layout(r.arena); err != nil {
		return err
	}
	r.report.Bytes = r.arena.Bytes()
	r.stream, err = d.NewStream()
	return err
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

// load fills dst, dense, with the elements of an entry from start on; a tensor that is not wanted
// is nil.
func (r *run) load(dst tensor.Tensor, e tensor.Entry, start int64, wrong func(float32) string) error {
	if dst.IsNil() {
		return nil
	}
	n := dst.Numel()
	if dst.Where == tensor.Host && dst.DType == tensor.F32 {
		return r.in.read(e, start, dst.Float32s(), wrong)
	}
	if r.piece == nil {
		r.piece = make([]float32, pieceBytes/4)
	}
	for lo, flat := int64(0), dst.View(n); lo < n; lo += int64(len(r.piece)) {
		hi := min(lo+int64(len(r.piece)), n)
		values := r.piece[:hi-lo]
		if err := r.in.read(e, start+lo, values, wrong); err != nil {
			return err
		}
		if err := r.dev.Copy(r.stream, flat.Slice(0, lo, hi), tensor.OfFloat32(values, hi-lo)); err != nil {
			return err
		}
		if err := r.stream.Sync(); err != nil { // the piece is used again
			return err
		}
	}
	return nil
}

// taker takes tensors from an arena until one fails.
type taker struct {
	arena *device.Arena
	err   error
}

func (t *taker) take(dtype tensor.DType, shape ...int64) (x tensor.Tensor) {
	if t.err == nil {
		x, t.err = t.arena.Tensor(dtype, shape...)
	}
	return x
}
