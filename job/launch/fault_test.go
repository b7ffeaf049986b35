package launch

import (
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/internal/status"
)

// A fault that is misspelt is refused, because a test of how a job ends would pass without it.
func TestFaultWords(t *testing.T) {
	for _, word := range []string{"kill", "kill:1", "kill:1:2:3", "kill:a:2", "kill:1:2x", "gone:1:2", "slow:1:2:soon",
		"slow:1:2:-1s", "slow:1:2:1s:2"} {
		t.Setenv("ULYSSES_FAULT", word)
		if fault, err := FaultHook(nil); fault != nil || status.Of(err) != status.InvalidArgument {
			t.Errorf("%s: %v", word, err)
		}
	}
}

// The named rank alone pauses, in each step after the named one.
func TestFaultSlow(t *testing.T) {
	t.Setenv("ULYSSES_FAULT", "slow:1:2:30ms")
	err := comm.RunLocal(2, func(c comm.Comm) error {
		fault, err := FaultHook(c)
		if err != nil {
			return err
		}
		for step := range int64(5) {
			began := time.Now()
			if err := fault(step); err != nil {
				return err
			}
			if paused := time.Since(began) >= 30*time.Millisecond; step > 2 && c.Rank() == 1 && !paused {
				t.Errorf("no pause in step %d", step)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
