package report

import (
	"encoding/json"
	"os"
	"runtime"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/train"
)

// rankFacts holds what one rank has measured of its own run.
type rankFacts struct {
	Host, CPU, Device string
	Threads           int
	Phases            []clock.Phase
	Sent              []comm.Entry
	Formula           []train.Traffic
	Levels            *comm.Traffic // of all-to-alls with two levels; nil if they are direct
	Memory            []train.Allocation
	Resident          int64   // peak memory of the process; 0 = unknown
	Cores             int     // cores that the process may use
	Waited            float64 // seconds in the steps that the process's threads waited for a core
}

// WaitedForCore returns proc.WaitedForCore of this rank's process. If the ranks are goroutines of
// one process, rank 0 returns the average over them and the others return 0: the process has more
// threads with more ranks, and 512 ranks that each read all of them took 4 s.
func WaitedForCore(world comm.Comm) (seconds float64) {
	switch {
	case world.Kind() != "local":
		return proc.WaitedForCore()
	case world.Rank() == 0:
		return proc.WaitedForCore() / float64(world.Size())
	}
	return 0
}

// gatherFacts returns the facts of all ranks, in rank order, on rank 0, and nil on the other ranks,
// which print nothing: if each rank decoded all facts, goroutine ranks would spend half of a short
// run on it. They do not include the bytes that gatherFacts itself sends. Collective.
func (r *Run) gatherFacts() ([]rankFacts, error) {
	info := r.Parts.Device.Info()
	host, _ := os.Hostname()
	waited := max(0, WaitedForCore(r.world())-r.Waited)
	var levels *comm.Traffic
	if t := r.Parts.Mesh.TwoLevel(); t != nil {
		moved := t.Moved()
		levels = &moved
	}
	own, err := json.Marshal(rankFacts{Levels: levels, Host: host, CPU: proc.Processor(),
		Device: info.Name, Threads: info.Workers, Phases: r.Parts.Clock.Phases(), Sent: r.Ledger.Entries(),
		Formula: r.Trainer.Traffic(), Memory: r.Trainer.Allocations(), Resident: proc.ResidentPeak(),
		Cores: runtime.NumCPU(), Waited: waited})
	if err != nil {
		return nil, status.Errorf(status.Internal, "report: %w", err)
	}
	texts, err := comm.GatherBytes(r.world(), own)
	if err != nil || r.world().Rank() > 0 {
		return nil, err
	}
	all := make([]rankFacts, len(texts))
	for rank, text := range texts {
		if err := json.Unmarshal(text, &all[rank]); err != nil {
			return nil, status.Errorf(status.Internal, "report: rank %d: %w", rank, err)
		}
	}
	return all, nil
}
