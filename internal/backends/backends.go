// Package backends opens devices and the communicators that go with them by the names of the job file.
package backends

import (
	"os"
	"runtime"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/status"
)

// Open opens the device of backend "auto", "cpu" or "cuda". threads 0 shares the cores this process may use among the ranks that share
// them. "cuda" never falls back to the CPU.
func Open(backend string, threads, ranksOnNode int) (device.Device, error) {
	switch backend {
	case "auto", "cpu":
		if threads == 0 {
			threads = max(1, runtime.NumCPU()/max(1, ranksOnNode))
		}
		return cpu.New(cpu.Options{Workers: threads, ISA: os.Getenv("ULYSSES_ISA")})
	case "cuda":
		return nil, status.Errorf(status.Unsupported, "device.backend = \"cuda\": this build has no CUDA plug-in: use \"cpu\" or \"auto\"")
	}
	return nil, status.Errorf(status.InvalidConfig, "device.backend = %q: auto, cpu or cuda", backend)
}

// OpenComm gives the communicator for tensors of the device: on the CPU the host's own. The policy is the job file's device.comm; one
// that does not fit is refused.
func OpenComm(d device.Device, host comm.Comm, policy string) (comm.Comm, error) {
	switch {
	case policy == "auto" || policy == host.Kind():
		return host, nil
	case policy == "mpi" || policy == "local":
		return nil, status.Errorf(status.Unsupported, "device.comm = %q: these ranks were started as %q: say \"auto\"", policy, host.Kind())
	}
	return nil, status.Errorf(status.Unsupported, "device.comm = %q on device %s: say \"auto\"", policy, d.Info().Kind)
}
