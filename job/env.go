package job

import (
	"io"

	"github.com/rs/zerolog"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
)

// Env is what one rank of a job is wired to.
type Env struct {
	Job    *Job
	Device device.Device
	Mesh   *comm.Mesh
	Ledger *comm.Ledger
	Clock  *clock.Clock
	Watch  *comm.Watch
	Stdout io.Writer      // tables; discards on ranks above 0
	Stderr io.Writer      // where Log writes
	Log    zerolog.Logger // info from rank 0 alone, errors from all

	world comm.Comm // the ranks themselves: not counted, not watched
	alone bool      // an error from now on is this rank's own: its peers sit in a collective
}
