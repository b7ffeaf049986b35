// Package doctor lists what a machine offers to jobs (processor, memory, MPI, GPUs, libraries) and,
// for each missing thing, the consequence and the fix. Print is all of it.
package doctor

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"text/tabwriter"

	"github.com/klauspost/cpuid/v2"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/internal/proc"
	"ulysses/internal/units"
	"ulysses/slurm"
)

// finding is one line of doctor: what was looked for, what was found, and if something is missing,
// what that costs and how to get it.
type finding struct {
	what, found string
	costs, fix  string // "" when nothing is missing
}

// Print prints what this machine offers and what is missing. What is missing is no failure.
func Print(w io.Writer) error {
	findings := append([]finding{processor(), kernels(), cores(), hostMemory(), sharedMemory(), mpi(), launcher()}, gpus()...)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range findings {
		fmt.Fprintf(table, "  %s\t%s\n", f.what, f.found)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	missing := 0
	for _, f := range findings {
		if f.costs == "" {
			continue
		}
		if missing++; missing == 1 {
			if _, err := fmt.Fprintln(w, "\nmissing:"); err != nil {
				return err
			}
		}
		if _, err := fmt.Fprintf(w, "  %s: %s\n    %s\n", f.what, f.costs, f.fix); err != nil {
			return err
		}
	}
	if missing == 0 {
		_, err := fmt.Fprintln(w, "\nnothing is missing")
		return err
	}
	return nil
}

func processor() finding {
	var have []string
	for _, f := range []struct {
		id   cpuid.FeatureID
		name string
	}{{cpuid.AVX2, "AVX2"}, {cpuid.FMA3, "FMA3"}, {cpuid.AVX512F, "AVX-512F"}, {cpuid.AVX512DQ, "AVX-512DQ"}, {cpuid.AVX512BW, "AVX-512BW"},
		{cpuid.AVX512VL, "AVX-512VL"}, {cpuid.AVX512BF16, "AVX-512BF16"}, {cpuid.AMXBF16, "AMX-BF16"}} {
		if cpuid.CPU.Supports(f.id) {
			have = append(have, f.name)
		}
	}
	f := finding{what: "processor", found: fmt.Sprintf("%s (%s): %s", strings.TrimSpace(cpuid.CPU.BrandName), runtime.GOARCH, strings.Join(have, " "))}
	if !cpuid.CPU.Supports(cpuid.AVX2, cpuid.FMA3) {
		f.costs, f.fix = "no AVX2 with FMA: the portable kernels run, several times slower", "use a machine from after 2015; in a virtual machine pass the host's CPU model through"
	}
	return f
}

func kernels() finding {
	d, _, err := backends.Open(backends.Choice{Backend: "cpu"})
	if err != nil {
		return finding{"kernels", "none", err.Error(), "unset ULYSSES_ISA, or set it to one that is named"}
	}
	defer d.Close()
	f := finding{what: "kernels", found: d.Info().Kernels}
	if pin := os.Getenv("ULYSSES_ISA"); pin != "" {
		f.found += ", pinned by ULYSSES_ISA"
	} else {
		f.found += ", the best this processor runs (ULYSSES_ISA pins another)"
	}
	return f
}

// cores: NumCPU counts the affinity mask, GOMAXPROCS a container's quota besides.
func cores() finding {
	n, quota := runtime.NumCPU(), runtime.GOMAXPROCS(0)
	f := finding{what: "cores", found: fmt.Sprintf("%d allowed to this process, %d physical in the machine", n, cpuid.CPU.PhysicalCores)}
	if quota < n {
		f.costs = fmt.Sprintf("a quota (GOMAXPROCS or the container's) of %d of the %d cores: more threads than that slow each other down", quota, n)
		f.fix = fmt.Sprintf("raise the quota, or keep ranks x device.threads at %d", quota)
	}
	return f
}

func hostMemory() finding {
	total, free := proc.Meminfo("MemTotal:"), proc.Meminfo("MemAvailable:")
	f := finding{what: "memory", found: fmt.Sprintf("%s free of %s", units.GiB(free), units.GiB(total))}
	if limit := proc.MemoryLimit(); limit > 0 && limit < total {
		f.found += fmt.Sprintf("; the container is limited to %s", units.GiB(limit))
	}
	if total == 0 {
		f.found = "unknown: /proc/meminfo cannot be read"
	}
	return f
}

func mpi() finding {
	f := finding{what: "MPI", found: strings.Join(strings.Fields(comm.Library()), " ")}
	switch _, err := exec.LookPath("mpirun"); {
	case !comm.Available():
		f.costs = "ranks run inside one process only (--ranks N): one machine"
		f.fix = "install it (Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin pkg-config) and build with make, or go build -tags mpi ./cmd/ulysses-mpi"
	case err != nil:
		if _, err := exec.LookPath("srun"); err != nil {
			f.costs, f.fix = "neither mpirun nor srun is in PATH: nothing to start several processes with", "install the launcher (Debian, Ubuntu: apt-get install openmpi-bin)"
		}
	}
	return f
}

func launcher() finding {
	e := slurm.Env()
	if e.Tasks <= 1 && e.Launcher == "" {
		return finding{what: "launcher", found: "none: started alone"}
	}
	return finding{what: "launcher", found: fmt.Sprintf("%s: %d tasks, %d on this node (%s)", e.Launcher, e.Tasks, e.LocalSize, e.Host)}
}
