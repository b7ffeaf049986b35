package comm

/*
#cgo linux LDFLAGS: -ldl
#include "mpi_bridge.h"
*/
import "C"

import (
	"os"
	"runtime"
	"strings"
	"sync"

	"ulysses/internal/status"
	"ulysses/slurm"
)

// MPI is reached through a table of C functions (mpi_table.h), linked into the program (tag mpi) or
// opened when a host program's communicator comes (FromMPI): code without MPI builds, loads and
// runs.

var mpiStart struct {
	sync.Mutex
	loaded bool   // the table is there
	end    func() // set by World, where it started MPI
}

// Library is the MPI library and its thread level, "Open MPI v4.1.4, thread level multiple".
func Library() string {
	mpiStart.Lock()
	defer mpiStart.Unlock()
	if !mpiStart.loaded {
		return "none: built without the tag mpi"
	}
	initialized, finalized, level := mpiState()
	switch name := libraryName(); {
	case !initialized:
		return name + ", not started"
	case finalized:
		return name + ", ended"
	case level == threadMultiple:
		return name + ", thread level multiple"
	default:
		return name + ", thread level below multiple"
	}
}

// libraryName is the start of the text by which the library of the table names itself, "Open MPI
// v4.1.4".
func libraryName() string {
	var text [4096]C.char
	C.umpi_library(&text[0], C.int(len(text)))
	return firstWords(C.GoString(&text[0]))
}

func firstWords(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	name, _, _ := strings.Cut(line, ",")
	return strings.Join(strings.Fields(name), " ")
}

// Thread levels, in the order that MPI gives them.
const (
	threadSingle = iota
	threadFunneled
	threadSerialized
	threadMultiple
)

func mpiState() (initialized, finalized bool, level int) {
	var i, f, l C.int
	C.umpi_state(&i, &f, &l)
	return i != 0, f != 0, int(l)
}

// prepare sets what libraries read when they start, where the user has not.
func prepare() {
	set := func(name, value string) {
		if _, ok := os.LookupEnv(name); !ok {
			os.Setenv(name, value)
		}
	}
	// UCX would take the handler of segmentation faults away from the Go runtime, which turns them
	// into panics.
	set("UCX_ERROR_SIGNALS", "")
	set("UCX_WARN_UNUSED_ENV_VARS", "n") // not every UCX knows that one, and it would say so
	// Ranks that share cores must give them up while they wait; mpirun knows when, srun does not
	// say.
	if slurm.Env().LocalSize > runtime.NumCPU() {
		set("OMPI_MCA_mpi_yield_when_idle", "1")
	}
}

// Finalize ends MPI if World or FromMPI started it. All ranks call it, when all is well; otherwise
// Abort. After FromMPI a C program's exit(0) does it, too; a Go program's end does not.
func Finalize() {
	mpiStart.Lock()
	defer mpiStart.Unlock()
	if !mpiStart.loaded {
		return
	}
	if _, finalized, _ := mpiState(); mpiStart.end != nil && !finalized {
		mpiStart.end()
		return
	}
	C.umpi_end()
}

// mpiComm is a communicator of MPI. Memory is the host's. It serves one goroutine at a time;
// different ones may be used at once.
type mpiComm struct {
	collectives
	c      C.umpi_comm
	closed bool
	seq    int64 // exchanges started
	// control broadcasts bytes of the host by a way of its own; nil where there is none.
	control func(root int, data []byte) error

	ints    []C.int         // two vectors of size: counts and offsets
	pending *C.umpi_pending // of the blocking calls
	spare   []*mpiRequest
}

// mpiRequest is an exchange under way. MPI_Ialltoallv would do the same, but was seen to take twice
// the time at 16 MiB on two ranks.
type mpiRequest struct {
	m       *mpiComm
	pending *C.umpi_pending
	pins    runtime.Pinner // of Go memory, between start and wait
	active  bool
	done    C.int
}

// sized asks for rank and size and makes what calls use.
func (m *mpiComm) sized(operation string) (*mpiComm, error) {
	var rank, size C.int
	if err := mpiError(operation, C.umpi_identify(m.c, &rank, &size)); err != nil {
		return nil, err
	}
	m.collectives = newCollectives(m, int(rank), int(size))
	m.ints = make([]C.int, 2*m.size)
	return m, mpiError(operation, C.umpi_pending_new(&m.pending))
}

func mpiError(operation string, code C.int) error {
	switch code {
	case 0:
		return nil
	case C.UMPI_SHORT:
		return status.Errorf(status.Comm, "%s: a message is shorter than its receiver expects: both ranks must name one size", operation)
	case C.UMPI_ENDED:
		return status.Errorf(status.Comm, "%s: MPI has ended: close communicators and contexts before MPI_Finalize", operation)
	case C.UMPI_THREAD:
		return status.Errorf(status.InvalidArgument, "%s: MPI was started below MPI_THREAD_SERIALIZED and this is not the thread that started it: "+
			"call from that thread, or start MPI with MPI_THREAD_MULTIPLE", operation)
	case C.UMPI_NULL:
		return status.Errorf(status.InvalidArgument, "%s: no communicator has this handle: pass MPI_Comm_c2f() of one that is not freed, or -1 for MPI_COMM_WORLD", operation)
	case C.UMPI_INTER:
		return status.Errorf(status.InvalidArgument, "%s: this is an intercommunicator: pass what MPI_Intercomm_merge makes of it", operation)
	}
	var text [1024]C.char
	C.umpi_error_text(code, &text[0], C.int(len(text)))
	return status.Errorf(status.Comm, "%s: %s", operation, C.GoString(&text[0]))
}

func (m *mpiComm) Rank() int    { return m.rank }
func (m *mpiComm) Size() int    { return m.size }
func (m *mpiComm) Kind() string { return "mpi" }

// Fortran is the communicator's handle as an integer (MPI_Comm_c2f), the form in which libraries
// pass one.
func (m *mpiComm) Fortran() int64 {
	var f C.int32_t
	C.umpi_fortran(m.c, &f)
	return int64(f)
}

func (m *mpiComm) Split(color, key int) (Comm, error) {
	if err := m.open("comm.Split"); err != nil {
		return nil, err
	}
	sub := &mpiComm{}
	var none C.int
	if err := mpiError("comm.Split", C.umpi_split(m.c, C.int(max(color, -1)), C.int(key), &sub.c, &none)); err != nil || none != 0 {
		return nil, err
	}
	return sub.sized("comm.Split")
}

// Abort ends all processes of the job with the code; it does not return, unless MPI has ended. The
// caller has said why, for MPI cannot.
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
	return mpiError("comm.Close", C.umpi_release(m.c))
}

func (m *mpiComm) open(operation string) error {
	if m.closed {
		return status.Errorf(status.InvalidArgument, "%s: the communicator is closed", operation)
	}
	return nil
}
