package job

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"ulysses/internal/status"
)

// probe returns the function for ULYSSES_FAULT=kind:rank:step, which makes this rank fail in the
// middle of a step: it is killed, fails, panics, crashes or never returns. Tests use it to see a
// job end. If the variable is unset, probe returns nil.
func probe(rank int) (func(step int64) error, error) {
	word := os.Getenv("ULYSSES_FAULT")
	if word == "" {
		return nil, nil
	}
	var who int
	var when int64
	kind, where, _ := strings.Cut(word, ":")
	if n, err := fmt.Sscanf(where, "%d:%d", &who, &when); n != 2 || err != nil {
		return nil, status.Errorf(status.InvalidArgument, "ULYSSES_FAULT=%s: want kill, fail, panic, crash or late:rank:step", word)
	}
	faults := map[string]func() error{
		"kill":  func() error { return syscall.Kill(os.Getpid(), syscall.SIGKILL) },
		"fail":  func() error { return status.Errorf(status.Internal, "step %d: asked to fail by ULYSSES_FAULT", when) },
		"panic": func() error { panic("asked to panic by ULYSSES_FAULT") },
		"crash": func() error { go panic("asked to crash by ULYSSES_FAULT"); select {} },
		"late":  func() error { time.Sleep(time.Hour); return nil },
	}
	fault := faults[kind]
	if fault == nil {
		return nil, status.Errorf(status.InvalidArgument, "ULYSSES_FAULT=%s: want kill, fail, panic, crash or late:rank:step", word)
	}
	return func(step int64) error {
		if rank == who && step == when {
			return fault()
		}
		return nil
	}, nil
}
