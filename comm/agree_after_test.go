package comm_test

import (
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/testkit/gathers"
)

// While f runs on one rank, the ranks communicate, and the error of f is that of all ranks.
func TestAgreeAfter(t *testing.T) {
	calls := make(chan struct{})
	err := comm.RunLocal(3, func(c comm.Comm) error {
		g := gathers.New(c, calls)
		err := comm.AgreeAfter(g, func() error {
			if c.Rank() != 1 {
				return nil
			}
			if err := gathers.Wait(calls); err != nil {
				return err
			}
			return status.Errorf(status.IO, "a fault")
		})
		if status.Of(err) != status.IO || err.Error() != "rank 1: a fault" {
			t.Errorf("rank %d: %v", c.Rank(), err)
		}
		return comm.AgreeAfter(g, func() error { return nil })
	})
	if err != nil {
		t.Error(err)
	}
}
