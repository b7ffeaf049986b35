// Package backends opens devices and communicators by the names that a job file uses.
//
// Open opens a device from a Choice (device.backend). OpenComm selects and opens the communicator
// for the device's memory (device.comm). FindGPUs lists what doctor reports.
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

// Choice has the settings of a rank's device, from the job file and the launcher.
type Choice struct {
	Backend string // "auto", "cpu" or "cuda"
	// Threads of a CPU device; 0 = the cores of this process divided by RanksOnNode
	Threads       int
	LocalRank     int // rank on this node; selects the GPU
	RanksOnNode   int
	Deterministic bool // results of a GPU are bitwise reproducible
}

// Open opens a device. With "auto" it also returns the reason for its choice. "auto" uses the CPU
// if there is no plug-in or no GPU; a plug-in that cannot be used is an error. "cuda" never falls
// back to the CPU. The caller closes the device. Not collective.
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
	return nil, "", status.Errorf(status.InvalidConfig, "device.backend = %q is unknown; use auto, cpu or cuda",
		c.Backend)
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
		return nil, status.Errorf(status.Of(err),
			"device.backend = \"cuda\": %w; or set device.backend to \"cpu\" or \"auto\"", err)
	case err != nil:
		return nil, status.Errorf(status.Of(err), "device.backend = \"cuda\": %w", err)
	case found.Count == 0:
		return nil, status.Errorf(status.Device,
			"device.backend = \"cuda\": %s; or set device.backend to \"cpu\" or \"auto\"", found.Text)
	}
	return openGPU(c, found)
}

// openGPU opens the GPU of this rank: number LocalRank modulo the number of visible GPUs. Ranks may
// share a GPU.
func openGPU(c Choice, found cuda.Findings) (device.Device, error) {
	d, err := cuda.Open(cuda.Options{Ordinal: c.LocalRank % found.Count, Deterministic: c.Deterministic,
		Kernels: os.Getenv("ULYSSES_KERNEL")})
	if err != nil {
		return nil, err // a nil *cuda.Device in d would not be a nil interface
	}
	return d, nil
}

// withoutGPU reports whether this machine has no GPU, and the user names no plug-in: then a plug-in
// of another version, as an old build leaves it beside the program, does not matter.
func withoutGPU() bool {
	return os.Getenv("ULYSSES_CUDA_PLUGIN") == "" && cuda.WhyUnusable(cuda.Find()) != ""
}

func openEither(c Choice) (d device.Device, why string, err error) {
	found, err := cuda.Probe()
	switch {
	case errors.Is(err, cuda.ErrNoPlugin):
		why = "no CUDA plug-in found"
	case err != nil && withoutGPU():
		why = "no GPU, and a CUDA plug-in that cannot be used"
	case err != nil:
		return nil, "", status.Errorf(status.Of(err), "device.backend = \"auto\": %w; or set device.backend = \"cpu\"",
			err)
	case found.Count == 0:
		why, _, _ = strings.Cut(found.Text, ":")
	default:
		d, err = openGPU(c, found)
		return d, fmt.Sprintf("using a GPU, one of %d that this rank sees", found.Count), err
	}
	d, err = openCPU(c)
	return d, "using the CPU: " + why + "; run `ulysses-mpi doctor` for details", err
}
