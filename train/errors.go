package train

import (
	"errors"

	"ulysses/comm"
	"ulysses/internal/status"
)

// shared is an error that all ranks return after the same collectives, so no rank waits for
// another.
type shared struct{ error }

func (e shared) Unwrap() error { return e.error }

// Shared reports whether every rank of the run returns this error. Then no rank is inside a
// collective, and the job can end with the error's code and one message instead of an abort.
func Shared(err error) bool {
	var e shared
	return errors.As(err, &e)
}

// agree is comm.Agree. It marks the error as shared, unless the ranks cannot be reached.
func agree(world comm.Comm, err error) error { return sharing(comm.Agree(world, err)) }

// agreeAfter is comm.AgreeAfter, and marks the error as agree does.
func agreeAfter(world comm.Comm, f func() error) error { return sharing(comm.AgreeAfter(world, f)) }

// sharing marks the error of all ranks.
func sharing(err error) error {
	if err == nil || status.Of(err) == status.Comm {
		return err
	}
	return shared{err}
}
