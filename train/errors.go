package train

import (
	"errors"

	"ulysses/comm"
	"ulysses/internal/status"
)

// shared is an error that all ranks return after the same work, so no rank waits for another.
type shared struct{ error }

func (e shared) Unwrap() error { return e.error }

// Shared reports whether every rank of the run returns this error. The job may then end in an
// orderly way, with the error's code and one message.
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
