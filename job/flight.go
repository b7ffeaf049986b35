package job

import (
	"fmt"
	"path/filepath"
	"time"

	"ulysses/comm"
	"ulysses/internal/flight"
	"ulysses/internal/status"
	"ulysses/job/launch"
)

// flightFolder is the folder of the flight recorder in output.dir.
const flightFolder = "flight"

// beatInterval is the interval at which a rank shows in its record that the process runs.
const beatInterval = 100 * time.Millisecond

// syncBeats is the number of beats after which other hosts must see them.
const syncBeats = 100

// gather is how long a rank waits, after a call was late, for the records of the others. launch
// aborts the job within this time and a second.
const gather = 2 * time.Second

// recordFlight maps the records of all ranks into files of output.dir. A rank that cannot do it
// continues without. Collective.
func (e *Env) recordFlight() error {
	dir := filepath.Join(e.Job.Output.Dir, flightFolder)
	var err error
	if e.Mesh.World.Rank() == 0 {
		err = flight.Prepare(dir)
	}
	if comm.Agree(e.Mesh.World, err) != nil {
		if err != nil {
			e.Log.Warn().Msgf("%v; the run continues without it", err)
		}
		return nil
	}
	if err := e.Mesh.World.Barrier(); err != nil {
		return err
	}
	if err := e.flight.Attach(dir); err != nil {
		e.Log.Error().Msgf("rank %d: %v; the run continues without it", e.world.Rank(), err)
		return nil
	}
	e.signals.OnEnd(e.flight.Signal)
	e.signals.Blame(e.blame)
	e.beating = make(chan struct{})
	go e.beat(e.beating)
	return nil
}

// beat shows that the process runs. While a call is late, other hosts must see it as well.
func (e *Env) beat(stop chan struct{}) {
	for n := 0; ; n++ {
		select {
		case <-stop:
			return
		case <-time.After(beatInterval):
			e.flight.Beat(n%syncBeats == 0 || e.isLate.Load() && n%10 == 0)
		}
	}
}

// endFlight records how the rank ends. Only a run in which a rank fails alone leaves its records.
func (e *Env) endFlight(err error) {
	if e.beating == nil {
		return
	}
	close(e.beating)
	e.beating = nil
	if e.alone {
		e.flight.Finish(flight.Failed, err.Error())
		return
	}
	e.flight.Finish(flight.Finished, "")
	dir := e.flight.Dir()
	e.flight.Close()
	flight.Tidy(dir)
}

// blame prints the rank that is dead after a signal, if one is.
func (e *Env) blame() {
	dir := e.flight.Dir()
	if dir == "" {
		return
	}
	if d, err := flight.Dead(dir); err == nil && d != nil {
		e.Log.Error().Msgf("%s\nrecords of all ranks: %s", d.Text, dir)
	}
}

// culprits returns the ranks that the records name as the reason of an error of communication,
// which are not the rank that has the error; "" for other errors, and if there is no such rank.
func (e *Env) culprits(err error) string {
	dir := e.flight.Dir()
	if dir == "" || status.Of(err) != status.Comm {
		return ""
	}
	e.flight.Beat(true)
	time.Sleep(gather / 2) // ranks that have the same error record it
	d, fault := flight.Decide(dir)
	switch {
	case fault != nil:
		return "; " + fault.Error()
	case d == nil: // another rank prints it and ends the job
		time.Sleep(gather)
		return ""
	}
	return fmt.Sprintf("\n%s\nrecords of all ranks: %s", d.Text, dir)
}

// nearlyLate is called when no call has been made for three quarters of the timeout.
func (e *Env) nearlyLate(text string) {
	e.isLate.Store(true)
	e.Log.Error().Msg(text)
	if err := e.flight.WriteStacks(); err != nil {
		e.Log.Error().Msg(err.Error())
	}
	e.flight.Beat(true)
}

// late ends the job when a call has taken longer than the timeout. The ranks that are late write
// their records first; then the first of them says which rank is the reason.
func (e *Env) late(text string, r launch.Rank) {
	reason := fmt.Sprintf("%s; the limit is %v (ULYSSES_TIMEOUT or parallel.timeout)", text, e.timeout)
	if dir := e.flight.Dir(); dir != "" {
		e.isLate.Store(true)
		e.flight.WriteStacks()
		e.flight.Beat(true)
		time.Sleep(gather)
		d, err := flight.Decide(dir)
		switch {
		case err != nil:
			reason += "; " + err.Error()
		case d == nil: // another rank prints it and ends the job
			time.Sleep(gather)
		default:
			reason += fmt.Sprintf("\n%s\nrecords of all ranks: %s; compare them with: ulysses-mpi diagnose %s", d.Text,
				dir, dir)
		}
	}
	e.Log.Error().Msg(reason)
	e.flight.Finish(flight.Late, reason)
	r.World.Abort(status.Comm, reason)
	r.Late(reason)
}
