package job

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/klauspost/cpuid/v2"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/slurm"
)

// finding is one line of doctor: what was looked for, what was found, and if something is missing,
// what that costs and how to get it.
type finding struct {
	what, found   string
	costs, remedy string // "" when nothing is missing
}

// Doctor prints what this machine offers and what is missing. What is missing is no failure.
func Doctor(w io.Writer) error {
	if err := version(w); err != nil {
		return err
	}
	findings := append([]finding{processor(), kernels(), cores(), hostMemory(), sharedMemory(), mpi(), launcher()}, gpus()...)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range findings {
		fmt.Fprintf(table, "  %s\t%s\n", f.what, f.found)
	}
	if err := table.Flush(); err != nil {
		return written(0, err)
	}
	missing := 0
	for _, f := range findings {
		if f.costs == "" {
			continue
		}
		if missing++; missing == 1 {
			if err := written(fmt.Fprintln(w, "\nmissing:")); err != nil {
				return err
			}
		}
		if err := written(fmt.Fprintf(w, "  %s: %s\n    %s\n", f.what, f.costs, f.remedy)); err != nil {
			return err
		}
	}
	if missing == 0 {
		return written(fmt.Fprintln(w, "\nnothing is missing"))
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
		f.costs, f.remedy = "no AVX2 with FMA: the portable kernels run, several times slower", "use a machine from after 2015; in a virtual machine pass the host's CPU model through"
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
		f.remedy = fmt.Sprintf("raise the quota, or keep ranks x device.threads at %d", quota)
	}
	return f
}

func hostMemory() finding {
	total, free := meminfo("MemTotal:"), meminfo("MemAvailable:")
	f := finding{what: "memory", found: fmt.Sprintf("%s free of %s", gib(free), gib(total))}
	if limit := memoryLimit(); limit > 0 && limit < total {
		f.found += fmt.Sprintf("; the container is limited to %s", gib(limit))
	}
	if total == 0 {
		f.found = "unknown: /proc/meminfo cannot be read"
	}
	return f
}

// memoryLimit is the container's, 0 if there is none.
func memoryLimit() int64 {
	for _, path := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		if b, err := os.ReadFile(path); err == nil {
			limit, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
			return limit
		}
	}
	return 0
}

// freeMemory is what this process and its neighbours may take of the host's memory, 0 if nobody
// knows.
func freeMemory() int64 {
	free := meminfo("MemAvailable:")
	if limit := memoryLimit(); limit > 0 && limit < free {
		return limit
	}
	return free
}

// meminfo is a line of /proc/meminfo in bytes, 0 if there is none.
func meminfo(name string) int64 { return procBytes("/proc/meminfo", name) }

// procBytes is a line of such a file, "name 12 kB", in bytes; 0 if there is none.
func procBytes(path, name string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(b), "\n") {
		if w := strings.Fields(line); len(w) >= 2 && w[0] == name {
			n, _ := strconv.ParseInt(w[1], 10, 64)
			return n << 10
		}
	}
	return 0
}

func gib(bytes int64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }

func mpi() finding {
	f := finding{what: "MPI", found: strings.Join(strings.Fields(comm.Library()), " ")}
	switch _, err := exec.LookPath("mpirun"); {
	case !comm.Available():
		f.costs = "ranks run inside one process only (--ranks N): one machine"
		f.remedy = "install it (Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin pkg-config) and build with make, or go build -tags mpi ./cmd/ulysses-mpi"
	case err != nil:
		if _, err := exec.LookPath("srun"); err != nil {
			f.costs, f.remedy = "neither mpirun nor srun is in PATH: nothing to start several processes with", "install the launcher (Debian, Ubuntu: apt-get install openmpi-bin)"
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
