//go:build mpi

package comm

/*
#cgo pkg-config: ompi
#include "mpi_calls.h"
*/
import "C"

import (
	"os"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"github.com/emer/empi/mpi"

	"ulysses/internal/status"
	"ulysses/slurm"
)

// MPI is used through two layers. The package empi starts and ends it, says rank and size, and broadcasts bytes of the host. Its
// communicators are duplicated here, and what it lacks (v-variants, splits, requests, abort with a code) is mpi_calls.c.

// Available reports whether this program was built with MPI.
func Available() bool { return true }

var mpiStart struct {
	sync.Mutex
	owned bool // started here, so ended here
}

// Library is the MPI library and its thread level, "Open MPI v4.1.4, thread level multiple".
func Library() string {
	var text [4096]C.char
	C.umpi_library(&text[0], C.int(len(text)))
	full, _, _ := strings.Cut(C.GoString(&text[0]), "\n")
	name, _, _ := strings.Cut(full, ",")
	initialized, finalized, level := mpiState()
	switch {
	case !initialized:
		return name + ", not started"
	case finalized:
		return name + ", ended"
	case level == int(C.umpi_multiple()):
		return name + ", thread level multiple"
	}
	return name + ", thread level below multiple"
}

func mpiState() (initialized, finalized bool, level int) {
	var i, f, l C.int
	C.umpi_state(&i, &f, &l)
	return i != 0, f != 0, int(l)
}

// World is all processes of the MPI job, a duplicate of MPI_COMM_WORLD. The first call starts MPI, unless a host program has. It is
// collective. Compare its size with what the launcher says (slurm.Check): a foreign launcher makes every process a world of its own.
func World() (Comm, error) {
	mpiStart.Lock()
	defer mpiStart.Unlock()
	initialized, finalized, level := mpiState()
	switch {
	case finalized:
		return nil, status.Errorf(status.Comm, "comm.World: MPI has ended: it cannot be started twice")
	case initialized && level != int(C.umpi_multiple()):
		return nil, status.Errorf(status.Unsupported, "comm.World: the host program started MPI with thread level %d: start it with MPI_THREAD_MULTIPLE", level)
	case !initialized:
		prepare()
		if err := mpi.InitThreadSafe(); err != nil {
			return nil, status.Errorf(status.Unsupported, "comm.World: this MPI does not grant MPI_THREAD_MULTIPLE: use a library built with it: %w", err)
		}
		mpiStart.owned = true
		mpi.LogErrors = false // they are returned
		C.umpi_return_errors(C.umpi_world())
	}
	m := &mpiComm{rank: mpi.WorldRank(), size: mpi.WorldSize(), world: true}
	if err := mpiError("comm.World: MPI_Comm_dup", C.umpi_dup(C.umpi_world(), &m.c)); err != nil {
		return nil, err
	}
	return m.sized(), nil
}

// prepare sets what libraries read when they start, where the user has not.
func prepare() {
	set := func(name, value string) {
		if _, ok := os.LookupEnv(name); !ok {
			os.Setenv(name, value)
		}
	}
	// UCX would take the handler of segmentation faults away from the Go runtime, which turns them into panics.
	set("UCX_ERROR_SIGNALS", "")
	// Ranks that share cores must give them up while they wait; mpirun knows when, srun does not say.
	if slurm.Env().LocalSize > runtime.NumCPU() {
		set("OMPI_MCA_mpi_yield_when_idle", "1")
	}
}

// Finalize ends MPI if World started it. All ranks call it, when all is well; otherwise Abort.
func Finalize() {
	mpiStart.Lock()
	defer mpiStart.Unlock()
	if _, finalized, _ := mpiState(); mpiStart.owned && !finalized {
		mpi.Finalize()
	}
}

// mpiComm is a communicator of MPI. Memory is the host's. It serves one goroutine at a time; different ones may be used at once.
type mpiComm struct {
	c          C.MPI_Comm
	rank, size int
	world      bool // its ranks are those of MPI_COMM_WORLD, which empi reaches
	closed     bool
	seq        int64 // exchanges started
	control    *mpi.Comm

	ints    []C.int // two vectors of size: counts and offsets
	longs   []int64 // four vectors of size: offsets and bytes, of sends, then of receives
	parts   []unsafe.Pointer
	scratch []byte
	pending *C.umpi_pending // of the blocking calls
	spare   []*mpiRequest
}

func (m *mpiComm) sized() *mpiComm {
	m.ints, m.longs, m.parts = make([]C.int, 2*m.size), make([]int64, 4*m.size), make([]unsafe.Pointer, m.size)
	m.pending = C.umpi_pending_new()
	return m
}

func mpiError(operation string, code C.int) error {
	switch code {
	case 0:
		return nil
	case C.UMPI_SHORT:
		return status.Errorf(status.Comm, "%s: a message is shorter than its receiver expects: both ranks must name one size", operation)
	}
	var text [1024]C.char
	C.umpi_error_text(code, &text[0], C.int(len(text)))
	return status.Errorf(status.Comm, "%s: %s", operation, C.GoString(&text[0]))
}

func (m *mpiComm) Rank() int    { return m.rank }
func (m *mpiComm) Size() int    { return m.size }
func (m *mpiComm) Kind() string { return "mpi" }

// Fortran is the communicator's handle as an integer (MPI_Comm_c2f), the form in which libraries pass one.
func (m *mpiComm) Fortran() int64 { return int64(C.umpi_fortran(m.c)) }

func (m *mpiComm) Split(color, key int) (Comm, error) {
	if err := m.open("comm.Split"); err != nil {
		return nil, err
	}
	sub := &mpiComm{}
	var none, rank, size C.int
	if err := mpiError("comm.Split", C.umpi_split(m.c, C.int(max(color, -1)), C.int(key), &sub.c, &none)); err != nil || none != 0 {
		return nil, err
	}
	if err := mpiError("comm.Split", C.umpi_identify(sub.c, &rank, &size)); err != nil {
		return nil, err
	}
	sub.rank, sub.size = int(rank), int(size)
	return sub.sized(), nil
}

// Abort ends all processes of the job with the code; it does not return. The caller has said why, for MPI cannot.
func (m *mpiComm) Abort(code status.Code, reason string) {
	if code == status.OK {
		code = status.Internal // a launcher takes 0 for success
	}
	C.umpi_abort(C.int(code))
}

// Close gives the communicator up; with MPI that is collective.
func (m *mpiComm) Close() error {
	if m.closed {
		return nil
	}
	m.closed = true
	C.umpi_pending_free(m.pending)
	for _, r := range m.spare {
		C.umpi_pending_free(r.pending)
	}
	m.pending, m.spare = nil, nil
	if _, finalized, _ := mpiState(); finalized {
		return nil
	}
	return mpiError("comm.Close", C.umpi_free(&m.c))
}

func (m *mpiComm) open(operation string) error {
	if m.closed {
		return status.Errorf(status.InvalidArgument, "%s: the communicator is closed", operation)
	}
	return nil
}
