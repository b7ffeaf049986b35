package launch

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"ulysses/internal/status"
)

// FaultHook returns the function for ULYSSES_FAULT=kind:rank:step, which makes one rank fail at the
// end of a step: the rank is killed, returns an error, panics, crashes or never returns. Tests use
// it to check how a job ends. FaultHook returns nil if the variable is unset.
func FaultHook(rank int) (func(step int64) error, error) {
	word := os.Getenv("ULYSSES_FAULT")
	if word == "" {
		return nil, nil
	}
	faults := map[string]func(step int64) error{
		"kill": func(int64) error { return syscall.Kill(os.Getpid(), syscall.SIGKILL) },
		"fail": func(step int64) error {
			return status.Errorf(status.Internal, "step %d: error requested by ULYSSES_FAULT", step)
		},
		"panic": func(int64) error { panic("panic requested by ULYSSES_FAULT") },
		"crash": func(int64) error { go panic("crash requested by ULYSSES_FAULT"); select {} },
		"late":  func(int64) error { time.Sleep(time.Hour); return nil },
	}
	kind, where, _ := strings.Cut(word, ":")
	fault := faults[kind]
	var who int
	var when int64
	if n, err := fmt.Sscanf(where, "%d:%d", &who, &when); n != 2 || err != nil || fault == nil {
		return nil, status.Errorf(status.InvalidArgument, "ULYSSES_FAULT=%s: not kind:rank:step; the kinds are kill, fail, panic, crash and late", word)
	}
	return func(step int64) error {
		if rank == who && step == when {
			return fault(step)
		}
		return nil
	}, nil
}
