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
func agree(world comm.Comm, err error) error {
	if err = comm.Agree(world, err); err == nil || status.Of(err) == status.Comm {
		return err
	}
	return shared{err}
}
