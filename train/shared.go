package train

import (
	"errors"

	"ulysses/comm"
	"ulysses/internal/status"
)

// shared is an error that all ranks return after the same work: none is alone with it, and none
// waits for another.
type shared struct{ error }

func (e shared) Unwrap() error { return e.error }

// Shared reports an error that every rank of the run returns, so that the job may end as one that
// was refused does: once, and with its code.
func Shared(err error) bool {
	var e shared
	return errors.As(err, &e)
}

// agree is comm.Agree with an error that is known to be shared, unless the ranks cannot be reached.
func agree(world comm.Comm, err error) error {
	if err = comm.Agree(world, err); err == nil || status.Of(err) == status.Comm {
		return err
	}
	return shared{err}
}
