package flight

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Recorder keeps the last operations of this rank. A nil Recorder does nothing. Its methods may be
// called by several goroutines.
type Recorder struct {
	rank, size int
	host       string
	base       time.Time

	mu    sync.Mutex
	mem   []byte
	head  *header
	ring  *[Capacity]entry
	names []string
	dir   string   // "" before Attach, and after the file was lost
	file  *mapping // nil: private memory
	done  bool
}

// New returns a Recorder that keeps its records in private memory until Attach.
func New(rank, size int, host string) *Recorder {
	r := &Recorder{rank: rank, size: size, host: host, base: time.Now()}
	r.reset()
	return r
}

// reset starts a record in private memory.
func (r *Recorder) reset() {
	words := make([]uint64, fileSize/8) // words, because fields are accessed by atomic operations
	r.use(unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), fileSize))
	h := r.head
	copy(h.Magic[:], magic)
	h.Version, h.Rank, h.Size, h.PID, h.Capacity = version, uint32(r.rank), uint32(r.size),
		uint32(os.Getpid()), Capacity
	h.Wall = r.base.UnixNano()
	copy(h.Host[:len(h.Host)-1], r.host)
	r.names, r.dir, r.file = nil, "", nil
}

func (r *Recorder) use(mem []byte) {
	r.mem, r.head = mem, (*header)(unsafe.Pointer(&mem[0]))
	r.ring = (*[Capacity]entry)(unsafe.Pointer(&mem[headerSize]))
}

// write calls a function that accesses the record. If the file was truncated, or removed on a
// network file system, its memory cannot be accessed; the recorder then continues in private
// memory.
func (r *Recorder) write(do func()) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }: // a fault; the file stays mapped, because Beat may sync it
			r.reset()
		default:
			panic(p)
		}
	}()
	do()
}

func (r *Recorder) now() int64 { return max(1, int64(time.Since(r.base))) }

// Attach maps the rank's file in a folder and moves the records there. All ranks call it just after
// a barrier: this moment relates the clocks of their hosts.
func (r *Recorder) Attach(dir string) error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.head.Zero = r.now()
	r.head.Beat = r.head.Zero
	path := File(dir, r.rank)
	m, err := mapFile(path, fileSize)
	if err != nil {
		return status.Errorf(status.IO, "flight recorder: %w", err)
	}
	copy(m.mem, r.mem)
	r.dir, r.file = dir, m
	r.use(m.mem)
	return nil
}

// Dir returns the folder of the rank's file; "" if there is none.
func (r *Recorder) Dir() string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dir
}

// name returns the index of a name in the header. Names that do not fit share the last one.
func (r *Recorder) name(text string) uint8 {
	for i, n := range r.names {
		if n == text {
			return uint8(i)
		}
	}
	i := len(r.names)
	if i == maxNames-1 {
		text = "(other)"
	} else if i == maxNames {
		return maxNames - 1
	}
	r.names = append(r.names, text)
	copy(r.head.Name[i][:nameSize-1], text)
	return uint8(i)
}

// Begin records that an operation begins, and returns the argument of End. seq is its number in the
// group; a control operation is on values that ranks agree on. checksum is that of what must be
// equal on all ranks; 0 = nothing.
func (r *Recorder) Begin(op string, g Group, seq, bytes int64, control bool, checksum uint8) (number uint64) {
	r.write(func() {
		n := r.head.Count + 1
		e := &r.ring[n%Capacity]
		atomic.StoreUint64(&e.Number, 0)
		e.Seq, e.Bytes, e.Began, e.Ended, e.Step = seq, bytes, r.now(), 0, r.head.Step
		e.First, e.Stride, e.Size = int32(g.First), int32(g.Stride), int32(g.Size)
		e.Op, e.Axis, e.Control, e.Checksum = r.name(op), r.name(g.Axis), 0, checksum
		if control {
			e.Control = 1
		}
		atomic.StoreUint64(&e.Number, n)
		r.head.Count = n
		number = n
	})
	return number
}

// Checksum returns a checksum of a type and sizes that is never 0. It tells calls with different
// values apart in 254 of 255 cases.
func Checksum(kind int64, sizes []int64) uint8 {
	h := uint64(14695981039346656037) // FNV-1a
	mix := func(v int64) {
		for range 8 {
			h = (h ^ uint64(v&0xff)) * 1099511628211
			v >>= 8
		}
	}
	mix(kind)
	for _, v := range sizes {
		mix(v)
	}
	return uint8(h>>32%255) + 1
}

// Blame records the rank because of which a call has failed.
func (r *Recorder) Blame(rank int) { r.write(func() { r.head.Blames = uint32(rank + 1) }) }

// End records that the operation has ended.
func (r *Recorder) End(number uint64) {
	r.write(func() {
		if e := &r.ring[number%Capacity]; e.Number == number {
			e.Ended = r.now()
		}
	})
}

// Signal records that a signal has come that ends processes.
func (r *Recorder) Signal() {
	r.write(func() {
		if r.head.Signalled == 0 {
			r.head.Signalled = r.now()
		}
	})
}

// Step records the number of steps that are done.
func (r *Recorder) Step(n int64) { r.write(func() { r.head.Step = n }) }

// Beat records that the process runs. With sync it also writes the file to its file system, so that
// other hosts see it.
func (r *Recorder) Beat(sync bool) {
	var m *mapping
	r.write(func() {
		if m = r.file; !r.done {
			r.head.Beat = r.now()
		}
	})
	if sync && m != nil {
		m.sync()
	}
}

// Finish records how the process ends, once.
func (r *Recorder) Finish(s State, text string) {
	r.write(func() {
		if r.done {
			return
		}
		r.done = true
		h := r.head
		copy(h.Text[:len(h.Text)-1], text)
		h.Beat = r.now()
		h.Ended = h.Beat
		h.State = uint32(s)
		if r.file != nil && s != Finished {
			r.file.sync()
		}
	})
}

// WriteStacks writes the stacks of all goroutines beside the record. It does nothing before Attach.
func (r *Recorder) WriteStacks() error {
	dir := r.Dir()
	if dir == "" {
		return nil
	}
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	if err := os.WriteFile(StackFile(dir, r.rank), stacks, 0o666); err != nil {
		return status.Errorf(status.IO, "flight recorder: %w", err)
	}
	return nil
}

// Close deletes the rank's files. Later calls record into private memory.
func (r *Recorder) Close() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.file == nil {
		return
	}
	m, dir := r.file, r.dir
	r.reset()
	m.close()
	os.Remove(File(dir, r.rank))
	os.Remove(StackFile(dir, r.rank))
}

// previous is the folder, in the folder of the records, for the records of the run before.
const previous = "previous"

// Prepare creates the folder of the records. Records of an earlier run, which has failed, go into
// its folder "previous".
func Prepare(dir string) error {
	if err := prepare(dir); err != nil {
		return status.Errorf(status.IO, "flight recorder: %w", err)
	}
	return nil
}

func prepare(dir string) error {
	if err := os.MkdirAll(dir, 0o777); err != nil || len(files(dir)) == 0 {
		return err
	}
	old := filepath.Join(dir, previous)
	if err := os.MkdirAll(old, 0o777); err != nil {
		return err
	}
	for _, path := range files(old) {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	for _, path := range files(dir) {
		if err := os.Rename(path, filepath.Join(old, filepath.Base(path))); err != nil {
			return err
		}
	}
	return nil
}

// Tidy removes the folder if it is empty.
func Tidy(dir string) { os.Remove(dir) }

// files returns the files of this package in a folder.
func files(dir string) (paths []string) {
	for _, pattern := range []string{"rank-*.flight", "rank-*.stack", verdictFile} {
		paths = append(paths, input.Match(dir, pattern)...)
	}
	return paths
}

// File returns the name of a rank's record in a folder.
func File(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("rank-%05d.flight", rank))
}

// StackFile returns the name of the file with the stacks of a rank's goroutines.
func StackFile(dir string, rank int) string {
	return filepath.Join(dir, fmt.Sprintf("rank-%05d.stack", rank))
}
