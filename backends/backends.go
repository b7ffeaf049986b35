// Package backends opens devices, and the communicators for their memory, by the names that a job
// file uses.
package backends

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"ulysses/cpu"
	"ulysses/cuda"
	"ulysses/device"
	"ulysses/internal/status"
)

// Choice is what the job file and the launcher say of a rank's device.
type Choice struct {
	Backend string // "auto", "cpu" or "cuda"
	// of a CPU; 0 = the cores that this process may use, shared among the ranks that share them
	Threads       int
	LocalRank     int // among the ranks of this node: picks the GPU
	RanksOnNode   int
	Deterministic bool // every result of a GPU repeatable to the bit
}

// Open opens a device, and says why it is this one where the choice was left open. "cuda" never
// falls back to the CPU; "auto" does where there is no plug-in or no GPU, but not where a plug-in
// is there and broken.
func Open(c Choice) (d device.Device, why string, err error) {
	switch c.Backend {
	case "cpu":
		d, err = openCPU(c)
		return d, "", err
	case "cuda":
		d, err = openCUDA(c)
		return d, "", err
	case "auto":
		return openEither(c)
	}
	return nil, "", status.Errorf(status.InvalidConfig, "device.backend = %q: auto, cpu or cuda", c.Backend)
}

func openCPU(c Choice) (device.Device, error) {
	if c.Threads == 0 {
		c.Threads = max(1, runtime.NumCPU()/max(1, c.RanksOnNode))
	}
	return cpu.New(cpu.Options{Workers: c.Threads, ISA: os.Getenv("ULYSSES_ISA")})
}

func openCUDA(c Choice) (device.Device, error) {
	found, err := cuda.Probe()
	switch {
	case errors.Is(err, cuda.ErrNoPlugin):
		return nil, status.Errorf(status.Of(err), "device.backend = \"cuda\": %w; or use \"cpu\" or \"auto\"", err)
	case err != nil:
		return nil, status.Errorf(status.Of(err), "device.backend = \"cuda\": %w", err)
	case found.Count == 0:
		return nil, status.Errorf(status.Device, "device.backend = \"cuda\": %s; or use \"cpu\" or \"auto\"", found.Text)
	}
	return openGPU(c, found)
}

// openGPU opens the GPU of this rank: one of those that it sees, in turn. Ranks may share one.
func openGPU(c Choice, found cuda.Findings) (device.Device, error) {
	d, err := cuda.Open(cuda.Options{Ordinal: c.LocalRank % found.Count, Deterministic: c.Deterministic, Kernels: os.Getenv("ULYSSES_KERNEL")})
	if err != nil {
		return nil, err // not d: a nil *cuda.Device is not a nil device.Device
	}
	return d, nil
}

func openEither(c Choice) (d device.Device, why string, err error) {
	found, err := cuda.Probe()
	switch {
	case errors.Is(err, cuda.ErrNoPlugin):
		why = "no CUDA plug-in found"
	case err != nil:
		return nil, "", status.Errorf(status.Of(err), "device.backend = \"auto\": %w; or say \"cpu\"", err)
	case found.Count == 0:
		why, _, _ = strings.Cut(found.Text, ":")
	default:
		d, err = openGPU(c, found)
		return d, fmt.Sprintf("a GPU, of %d that this rank sees", found.Count), err
	}
	d, err = openCPU(c)
	return d, "using the CPU, " + why + "; run ulysses-mpi doctor for more", err
}
