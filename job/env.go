package job

import (
	"io"
	"time"

	"github.com/rs/zerolog"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/outdir"
	"ulysses/job/file"
	"ulysses/tensor"
)

// Env is what one rank of a job is wired to.
type Env struct {
	Job     *file.Job
	Device  device.Device
	Compute tensor.DType // of activations, and of the weights they meet
	Mesh    *comm.Mesh   // serves tensors of the host and of the device
	Ledger  *comm.Ledger
	Clock   *clock.Clock
	Watch   *comm.Watch
	Stdout  io.Writer      // tables; discards on ranks above 0, and with --quiet
	Details io.Writer      // the tables of --verbose; discards without it
	Result  io.Writer      // output that --quiet keeps; discards on ranks above 0
	Stderr  *screen        // where Log writes
	Log     zerolog.Logger // info from rank 0 alone, errors from all

	warned  *warned // the warnings that Log has written
	began   time.Time
	signals *signals
	args    []string // the command line
	bar     bool     // draw a progress bar on Stderr
	quiet   bool     // print results alone, in one line
	source  string   // of the job file
	sets    []string // table.key=value, of the command line

	world   comm.Comm // the ranks themselves, for tensors of the host: not counted, not watched
	opener  opener
	perNode int // ranks of this one's node
	threads int // of this rank for work of the host, as device.threads says
	// bytes of the host's memory that this rank may take, as the run began; 0 = unknown
	free    int64
	layered bool          // the mesh uses a communicator of the device instead of world
	owner   *outdir.Owner // of output.dir, on rank 0 of a job that trains or evaluates
	writes  bool          // the run has started to write into output.dir
	// errors from now on are this rank's alone: its peers wait in a collective
	alone bool
}
