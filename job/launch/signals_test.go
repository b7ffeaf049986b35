package launch

import (
	"io"
	"syscall"
	"testing"
	"time"
)

// When the run has stopped and its checkpoint is complete, another SIGTERM does not end the
// process: the exit code must be that of a stopped run. Otherwise handle would end this test.
func TestSignalAfterCheckpoint(t *testing.T) {
	x := &Signals{verb: "run", waits: true, stderr: io.Discard}
	x.handle(syscall.SIGTERM)
	if !x.stop.Load() || *x.why.Load() != "SIGTERM" {
		t.Fatal("the first signal does not stop the run")
	}
	x.at = time.Now().Add(-time.Minute)
	x.Saved()
	x.handle(syscall.SIGTERM)
}
