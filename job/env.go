package job

import (
	"io"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/flight"
	"ulysses/internal/outdir"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/tensor"
)

// Env is the environment of a job on one rank: the job file, the device, the communicators, the
// clock and the writers.
type Env struct {
	Job     *file.Job
	Device  device.Device
	Compute tensor.DType // of activations, and of the weights in matrix products
	Mesh    *comm.Mesh   // for tensors in host memory and in device memory
	Ledger  *comm.Ledger
	Clock   *clock.Clock
	Watch   *comm.Watch
	Stdout  io.Writer      // tables; discards on ranks above 0, and with --quiet
	Details io.Writer      // the tables of --verbose; discards without it
	Result  io.Writer      // output that --quiet keeps; discards on ranks above 0
	Stderr  *screen        // Log writes to it
	Log     zerolog.Logger // rank 0 logs everything, the other ranks only errors

	warned  *warned // the warnings that Log has written
	began   time.Time
	signals *launch.Signals
	args    []string // the command line
	bar     bool     // draw a progress bar on Stderr
	quiet   bool     // print results alone, in one line
	source  string   // of the job file
	sets    []string // table.key=value, of the command line

	seat
	world    comm.Comm // all ranks, for tensors in host memory; neither counted nor watched
	opener   opener
	timeout  time.Duration // of a collective; 0 = none
	places   []place       // of all ranks
	freeHost int64         // bytes of free host memory for this rank at the start; 0 = unknown
	nudged   bool          // verify: the last bit of each weight is changed
	layered  bool          // the mesh uses a communicator of the device instead of world
	owner    *outdir.Owner // of output.dir, on rank 0 of a job that trains or evaluates
	writes   bool          // the run has started to write into output.dir
	alone    bool          // an error is this rank's alone: its peers wait in a collective

	flight  *flight.Recorder
	beating chan struct{} // closed to end the heartbeat; nil before it
	isLate  *atomic.Bool  // a call, or the time since the last one, is near the timeout
}
