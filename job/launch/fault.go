package launch

import (
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/slurm"
	"ulysses/tensor"
)

// FaultHook returns the function for ULYSSES_FAULT=kind:rank:step, which makes one rank fail at the
// end of a step: the rank is killed or stopped, exits, returns an error, panics, crashes, never
// returns, skips a collective of world, calls another one than the other ranks or with a shorter
// tensor, or pauses in each step from then on, for 0.2 s or as slow:rank:step:pause says. The fault
// is in the first attempt of a job that is started again. Tests use it to check how a job ends.
// FaultHook returns nil if the variable is unset. All ranks must call the function.
func FaultHook(world comm.Comm) (func(step int64) error, error) {
	word := os.Getenv("ULYSSES_FAULT")
	if word == "" || os.Getenv("ULYSSES_ATTEMPT") > "0" || slurm.Env().Restarts > 0 {
		return nil, nil
	}
	pause := 200 * time.Millisecond
	faults := map[string]func(step int64) error{
		"kill": func(int64) error { return syscall.Kill(os.Getpid(), syscall.SIGKILL) },
		"fail": func(step int64) error {
			return status.Errorf(status.Internal, "step %d: error requested by ULYSSES_FAULT", step)
		},
		"panic": func(int64) error { panic("panic requested by ULYSSES_FAULT") },
		"crash": func(int64) error { go panic("crash requested by ULYSSES_FAULT"); select {} },
		"slow":  func(int64) error { time.Sleep(pause); return nil },
		"late":  func(int64) error { time.Sleep(time.Hour); return nil },
		"stop":  func(int64) error { return syscall.Kill(os.Getpid(), syscall.SIGSTOP) },
		"exit":  func(int64) error { os.Exit(0); return nil },
		"code":  func(int64) error { os.Exit(7); return nil },
		"skip":  func(int64) error { return nil },
		"short": func(int64) error { return world.AllReduce(nil, tensor.OfInt64([]int64{1}, 1), comm.Sum) },
		"other": func(int64) error { return world.AllReduce(nil, tensor.OfInt64([]int64{1}, 1), comm.Sum) },
	}
	usage := func() error {
		return status.Errorf(status.InvalidArgument,
			"ULYSSES_FAULT=%s: not kind:rank:step, or slow:rank:step:pause; the kinds are %s", word,
			strings.Join(slices.Sorted(maps.Keys(faults)), ", "))
	}
	kind, where, _ := strings.Cut(word, ":")
	fault := faults[kind]
	fields := strings.Split(where, ":")
	if kind == "slow" && len(fields) == 3 { // with the pause of each step
		var err error
		if pause, err = time.ParseDuration(fields[2]); err != nil || pause <= 0 {
			return nil, usage()
		}
		fields = fields[:2]
	}
	if fault == nil || len(fields) != 2 {
		return nil, usage()
	}
	who, noRank := strconv.Atoi(fields[0])
	when, noStep := strconv.ParseInt(fields[1], 10, 64)
	if noRank != nil || noStep != nil {
		return nil, usage()
	}
	together := kind == "skip" || kind == "other" || kind == "short" // a call of the other ranks
	return func(step int64) error {
		switch {
		case kind == "slow" && step > when && world.Rank() == who: // from this step on
			return fault(step)
		case step != when:
			return nil
		case world.Rank() == who:
			return fault(step)
		case kind == "short":
			return world.AllReduce(nil, tensor.OfInt64(make([]int64, 4*world.Size()), int64(4*world.Size())), comm.Sum)
		case together:
			return world.Barrier()
		}
		return nil
	}, nil
}
