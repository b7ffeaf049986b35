package comm

import (
	"errors"
	"fmt"

	"ulysses/internal/status"
)

// lengthError is the error of a rank that has received a message of another length than it expects.
type lengthError struct {
	operation string
	from      int // the sender's rank in the communicator
}

func (e *lengthError) Error() string {
	return fmt.Sprintf("%s: the message of rank %d has another length than its receiver expects; both ranks must give the same size",
		e.operation, e.from)
}

// inWorld returns err with the rank of the world instead of the rank in the communicator, and
// records this rank as the reason.
func (c *Counted) inWorld(err error) error {
	if err == nil {
		return nil
	}
	var length *lengthError
	if !errors.As(err, &length) {
		return err
	}
	rank := c.group.First + c.group.Stride*length.from
	c.watch.blame(rank)
	return status.Errorf(status.Comm, "%w", &lengthError{length.operation + " on axis " + c.axis, rank})
}
