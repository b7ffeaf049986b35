// Package flight is the flight recorder of a run. Each rank keeps its last operations in a file
// that is mapped into its memory, so the record outlives the process: a rank that is killed or
// stopped leaves it behind, and recording makes no system call.
//
// A rank makes a Recorder with New, and Attach maps its file once the folder is known. Begin and
// End record an operation, and Beat shows that the process runs. Read and ReadFolder read the files
// of all ranks, and Diagnose finds the ranks for which the others wait.
//
// The recorder of PyTorch (torch.distributed, TORCH_NCCL_TRACE_BUFFER_SIZE) is the model for the
// content of the records. There the first rank of a group is taken to be right; here the majority.
package flight

import (
	"fmt"
	"unsafe"
)

// Capacity is the number of operations that a rank keeps.
const Capacity = 1024

const (
	magic    = "ULYFLGHT"
	version  = 2
	maxNames = 48
	nameSize = 64
)

// Group is the ranks of a communicator, or the two ranks of a message in it: First, First + Stride,
// …, Size of them, as ranks of the world. Axis is the name of the communicator.
type Group struct {
	Axis                string
	First, Stride, Size int
}

// Has reports whether a rank of the world is in the group.
func (g Group) Has(rank int) bool {
	at := rank - g.First
	return at >= 0 && at%max(1, g.Stride) == 0 && at/max(1, g.Stride) < g.Size
}

// World returns the rank of the world that a rank of the group is.
func (g Group) World(rank int) int { return g.First + rank*g.Stride }

func (g Group) String() string {
	last := g.World(g.Size - 1)
	switch {
	case g.Size == 1:
		return fmt.Sprintf("axis %s (rank %d)", g.Axis, g.First)
	case g.Size == 2:
		return fmt.Sprintf("axis %s (ranks %d and %d)", g.Axis, g.First, last)
	case g.Stride > 1:
		return fmt.Sprintf("axis %s (ranks %d to %d in steps of %d)", g.Axis, g.First, last, g.Stride)
	}
	return fmt.Sprintf("axis %s (ranks %d to %d)", g.Axis, g.First, last)
}

// header is the first 4096 bytes of a file. Times are in nanoseconds since the process began.
type header struct {
	Magic                                 [8]byte
	Version, Rank, Size, PID, Capacity, _ uint32
	Wall                                  int64 // time of day when the process began, Unix
	Zero                                  int64 // a moment that all ranks have in common
	Beat, Step                            int64
	Count                                 uint64 // operations begun
	State                                 uint32
	Blames                                uint32 // 1 + the rank because of which a call has failed; 0 = none
	Ended                                 int64
	Signalled                             int64
	_                                     [32]byte
	Host                                  [64]byte
	Text                                  [832]byte
	Name                                  [maxNames][nameSize]byte
}

// entry is the record of one operation. Number is written last when it begins.
type entry struct {
	Number              uint64 // from 1
	Seq, Bytes          int64
	Began, Ended        int64 // Ended is 0 while the operation is in progress
	Step                int64
	First, Stride, Size int32
	Op, Axis            uint8 // indices of names
	Control             uint8
	Checksum            uint8 // of what must be equal on all ranks; 0 = nothing
}

const (
	headerSize = 4096
	entrySize  = 64
	fileSize   = headerSize + Capacity*entrySize
)

// State says how a process ended.
type State uint32

const (
	Running  State = iota
	Finished       // without an error
	Failed         // with an error, a panic or a signal; Text has it
	Late           // the watchdog ended the job
)

// The sizes are part of the format.
var (
	_ [headerSize]byte = [unsafe.Sizeof(header{})]byte{}
	_ [entrySize]byte  = [unsafe.Sizeof(entry{})]byte{}
)
