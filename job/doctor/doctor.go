// Package doctor lists the processor, the memory, MPI, the GPUs and the libraries of this machine
// and, for each missing one, the consequence and the fix. Print prints the list.
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
	"ulysses/job/cluster"
	"ulysses/slurm"
)

// finding is one line of the list. If something is missing, it has the consequence and the fix.
type finding struct {
	what, found      string
	consequence, fix string // "" = nothing is missing
}

// Print prints the list, then what is missing. Missing things are not an error.
func Print(w io.Writer) error {
	findings := append([]finding{processor(), kernels(), cores(), hostMemory(), sharedMemory(), mpi(), launcher(),
		network()}, gpus()...)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range findings {
		fmt.Fprintf(table, "  %s\t%s\n", f.what, f.found)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	missing := 0
	for _, f := range findings {
		if f.consequence == "" {
			continue
		}
		if missing++; missing == 1 {
			if _, err := fmt.Fprintln(w, "\nmissing:"); err != nil {
				return err
			}
		}
		if _, err := fmt.Fprintf(w, "  %s: %s\n    %s\n", f.what, f.consequence, f.fix); err != nil {
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
	}{{cpuid.AVX2, "AVX2"}, {cpuid.FMA3, "FMA3"}, {cpuid.AVX512F, "AVX-512F"}, {cpuid.AVX512DQ, "AVX-512DQ"},
		{cpuid.AVX512BW, "AVX-512BW"},
		{cpuid.AVX512VL, "AVX-512VL"}, {cpuid.AVX512BF16, "AVX-512BF16"}, {cpuid.AMXBF16, "AMX-BF16"},
		{cpuid.ASIMD, "NEON"}, {cpuid.SVE, "SVE"}, {cpuid.SVE2, "SVE2"}, {cpuid.BF16, "BF16"}} {
		if cpuid.CPU.Supports(f.id) {
			have = append(have, f.name)
		}
	}
	f := finding{what: "processor",
		found: fmt.Sprintf("%s (%s): %s", proc.Processor(), runtime.GOARCH,
			strings.Join(have, " "))}
	if runtime.GOARCH == "amd64" && !cpuid.CPU.Supports(cpuid.AVX2, cpuid.FMA3) {
		f.consequence, f.fix = "no AVX2 with FMA: the portable kernels run, several times slower",
			"use a processor with AVX2; in a virtual machine, pass the host's CPU model through"
	}
	return f
}

func kernels() finding {
	d, _, err := backends.Open(backends.Choice{Backend: "cpu"})
	if err != nil {
		return finding{"kernels", "none", err.Error(), "unset ULYSSES_ISA"}
	}
	defer d.Close()
	f := finding{what: "kernels", found: d.Info().Kernels}
	if pin := os.Getenv("ULYSSES_ISA"); pin != "" {
		f.found += ", set by ULYSSES_ISA"
	} else {
		f.found += ", the best of this processor (ULYSSES_ISA selects another)"
	}
	return f
}

// cores compares the affinity mask (NumCPU) with the quota of the container (GOMAXPROCS).
func cores() finding {
	n, quota := runtime.NumCPU(), runtime.GOMAXPROCS(0)
	f := finding{what: "cores",
		found: fmt.Sprintf("%d allowed to this process, %d physical in the machine", n, cpuid.CPU.PhysicalCores)}
	if quota < n {
		f.consequence = fmt.Sprintf(
			"GOMAXPROCS or the container allows %d of the %d cores: more threads slow each other down", quota, n)
		f.fix = fmt.Sprintf("raise the quota, or keep ranks x device.threads at or below %d", quota)
	}
	return f
}

func hostMemory() finding {
	total, free := proc.HostMemory()
	f := finding{what: "memory", found: fmt.Sprintf("%s free of %s", units.GiB(free), units.GiB(total))}
	if limit := proc.MemoryLimit(); limit > 0 && limit < total {
		f.found += fmt.Sprintf("; the control group of this process is limited to %s", units.GiB(limit))
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
		f.consequence = "all ranks run in one process (--ranks N), on one machine"
		f.fix = "install Open MPI (Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin pkg-config) and build with make"
	case err != nil:
		if _, err := exec.LookPath("srun"); err != nil {
			f.consequence, f.fix = "neither mpirun nor srun is in PATH: several processes cannot be started",
				"install the launcher (Debian, Ubuntu: apt-get install openmpi-bin)"
		}
	}
	return f
}

func launcher() finding {
	e := slurm.Env()
	if e.Tasks <= 1 && e.Launcher == "" {
		return finding{what: "launcher", found: "none"}
	}
	return finding{what: "launcher",
		found: fmt.Sprintf("%s: %d tasks, %d on this node (%s)", e.Launcher, e.Tasks, e.LocalSize, e.Host)}
}

// network lists the interfaces of this node, and advises on those that Open MPI should not use.
func network() finding {
	f := finding{what: "network", found: strings.Join(cluster.Interfaces(), " ")}
	if f.found == "" {
		f.found = "no interface has an address"
	}
	f.consequence, f.fix = cluster.InterfaceAdvice(cluster.Interfaces(), os.LookupEnv)
	return f
}
