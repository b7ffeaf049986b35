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
	"time"

	"ulysses/internal/status"
	"ulysses/slurm"
)

// All MPI calls go through a table of C functions (mpi_table.h). With the tag mpi the table is
// linked into the program. Without the tag FromMPI opens it as a shared library. Therefore the
// program and the library build and run without MPI.

var mpiStart struct {
	sync.Mutex
	loaded bool   // the table can be called
	end    func() // ends MPI if World has started it; else nil
}

// Library returns the name of the MPI library and its thread level: "Open MPI v4.1.4, thread level
// multiple". It is not collective.
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

// libraryName returns the start of MPI_Get_library_version of the table's library: "Open MPI
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

// Thread levels, in the order of the MPI standard.
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
func setLibraryDefaults() {
	set := func(name, value string) {
		if _, ok := os.LookupEnv(name); !ok {
			os.Setenv(name, value)
		}
	}
	// MPICH may be linked with UCX, which then has read its variables and set its handlers before
	// the Go runtime set its own. It would print a warning for each variable that is set later.
	if !strings.HasPrefix(libraryName(), "MPICH") {
		// By default UCX replaces the Go runtime's handler of segmentation faults, which turns them
		// into panics.
		set("UCX_ERROR_SIGNALS", "")
		// Some versions of UCX do not have UCX_ERROR_SIGNALS and would print a warning.
		set("UCX_WARN_UNUSED_ENV_VARS", "n")
	}
	// Open MPI does not try whether a container lets ranks read each other's memory. It would print
	// a line for each message, and then send it in another way.
	if copiesForbidden() {
		set("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
		set("OMPI_MCA_smsc", "^cma") // Open MPI 5
	}
	// Ranks that share cores must yield them while they wait. mpirun sets this, srun does not.
	if slurm.Env().LocalSize > runtime.NumCPU() {
		set("OMPI_MCA_mpi_yield_when_idle", "1")
	}
}

// Finalize ends MPI if World or FromMPI started it. It is collective over MPI_COMM_WORLD; after a
// failure call Abort instead. After FromMPI, exit(0) of a C program also ends MPI; the end of a Go
// program does not.
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

// mpiComm is an MPI communicator for host memory. It serves one goroutine at a time; different
// communicators may be used at once.
type mpiComm struct {
	collectives
	c       C.umpi_comm
	closed  bool
	seq     int64 // all-to-alls started
	waited  time.Duration
	seconds C.double // of waiting, as a call of the table returns them
	// control broadcasts bytes with empi; nil if the program was built without the tag mpi.
	control func(root int, data []byte) error

	ints    []C.int         // two vectors of size: counts and offsets
	flags   []byte          // one byte for each rank, then one of this rank
	pending *C.umpi_pending // of the blocking calls
	spare   freeList[mpiRequest]
}

// mpiRequest is an all-to-all in progress. MPI_Ialltoallv is not used: it took twice the time at
// 16 MiB on two ranks.
type mpiRequest struct {
	m       *mpiComm
	pending *C.umpi_pending
	pins    runtime.Pinner // of Go memory, between start and wait
	active  bool           // started, and Wait was not called yet
	done    C.int
}

// initialize reads rank and size from MPI and allocates the buffers of m.
func (m *mpiComm) initialize(operation string) (*mpiComm, error) {
	var rank, size C.int
	if err := mpiError(operation, C.umpi_identify(m.c, &rank, &size)); err != nil {
		return nil, err
	}
	m.collectives = newCollectives(m, int(rank), int(size))
	m.ints, m.flags = make([]C.int, 2*m.size), make([]byte, m.size+1)
	return m, mpiError(operation, C.umpi_pending_new(&m.pending))
}

func mpiError(operation string, code C.int) error {
	if code <= C.UMPI_LENGTH {
		return status.Errorf(status.Comm, "%w", &lengthError{operation: operation, from: int(C.UMPI_LENGTH - code)})
	}
	switch code {
	case 0:
		return nil
	case C.UMPI_ENDED:
		return status.Errorf(status.Comm, "%s: MPI has ended; close communicators and contexts before MPI_Finalize",
			operation)
	case C.UMPI_THREAD:
		return status.Errorf(status.InvalidArgument,
			"%s: MPI has a thread level below MPI_THREAD_SERIALIZED, and another thread has started MPI; "+
				"call from that thread, or start MPI with MPI_THREAD_MULTIPLE", operation)
	case C.UMPI_NULL:
		return status.Errorf(status.InvalidArgument,
			"%s: no communicator has this handle; pass MPI_Comm_c2f() of a communicator that was not freed, or -1 for MPI_COMM_WORLD",
			operation)
	case C.UMPI_INTER:
		return status.Errorf(status.InvalidArgument,
			"%s: the handle is an intercommunicator; pass the result of MPI_Intercomm_merge", operation)
	}
	var text [1024]C.char
	C.umpi_error_text(code, &text[0], C.int(len(text)))
	return status.Errorf(status.Comm, "%s: %s", operation, C.GoString(&text[0]))
}

func (m *mpiComm) Rank() int    { return m.rank }
func (m *mpiComm) Size() int    { return m.size }
func (m *mpiComm) Kind() string { return "mpi" }

// Waited returns the time in which calls have waited for other ranks. In an all-to-all and a
// send-receive this is the time until the first message of each sender. The library's own
// collectives do not say when ranks arrive: a call with up to UMPI_SMALL bytes from a rank counts
// as waiting, and a larger one follows a call with one byte, which does.
func (m *mpiComm) Waited() time.Duration { return m.waited }

// waits calls f, whose whole time counts as waiting.
func (m *mpiComm) waits(f func() C.int) C.int {
	began := time.Now()
	code := f()
	m.waited += time.Since(began)
	return code
}

// addWaited adds the seconds that a call of the table has measured.
func (m *mpiComm) addWaited(seconds C.double) {
	m.waited += time.Duration(float64(seconds) * float64(time.Second))
}

// Fortran returns the communicator's handle as an integer (MPI_Comm_c2f), the form in which
// libraries pass communicators.
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
	if err := mpiError("comm.Split", C.umpi_split(m.c, C.int(max(color, -1)), C.int(key), &sub.c, &none)); err != nil ||
		none != 0 {
		return nil, err
	}
	return sub.initialize("comm.Split")
}

// Abort ends all processes of the job with the code. It does not return, unless MPI has ended. The
// caller has printed the reason, because MPI does not.
func (m *mpiComm) Abort(code status.Code, reason string) {
	if code&255 == 0 {
		code = status.Internal // an exit code has 8 bits, and 0 would mean success to the launcher
	}
	C.umpi_abort(C.int(code))
}

// forbidden returns an error if MPI forbids calls on this thread.
func (m *mpiComm) forbidden(operation string) error {
	var rank, size C.int
	if code := C.umpi_identify(m.c, &rank, &size); code == C.UMPI_THREAD {
		return mpiError(operation, code)
	}
	return nil
}

// Close frees the communicator. Collective.
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
		return errClosed(operation)
	}
	return nil
}
