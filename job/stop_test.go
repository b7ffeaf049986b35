package job

import (
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"ulysses/device"
	"ulysses/internal/backends"
	"ulysses/internal/status"
)

// A request to stop that comes before the first step, while device, model and data are opened, is met after it.
func TestStopEarly(t *testing.T) {
	dir, _ := newKept(t)
	ask := func(c backends.Choice) (device.Device, string, error) {
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			return nil, "", err
		}
		return backends.Open(c)
	}
	err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: []string{"train.steps=1000"}, Ranks: 2, Stdout: io.Discard, Stderr: io.Discard,
		open: opener{ask, backends.OpenComm}})
	if status.Of(err) != status.Preempted {
		t.Errorf("it is to stop, and %v", err)
	}
}

// Of an hour, 25 minutes went into reading the model: that is no step, two of which no longer fit.
func TestStopAfterLongStart(t *testing.T) {
	j := Default()
	j.Train.TimeLimit = "1h"
	x, err := newStopper(&j, new(signals), time.Now().Add(-25*time.Minute))
	if err != nil || x.now() {
		t.Errorf("35 minutes are left for short steps: stopped, or %v", err)
	}
	x.last = x.last.Add(-18 * time.Minute)
	if !x.now() {
		t.Error("two steps of 18 minutes do not fit into 35")
	}
}
