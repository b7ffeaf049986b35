package job

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/rs/zerolog"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/proc"
	"ulysses/job/file"
	"ulysses/slurm"
	"ulysses/tensor"
)

// opener opens a rank's device, and the communicator that goes with it on top of one for the host;
// both say why it is these, where that was left open. Tests put a device of their own here.
type opener struct {
	device func(backends.Choice) (d device.Device, why string, err error)
	comm   func(d device.Device, host comm.Comm, policy string) (c comm.Comm, why string, err error)
}

var ordinary = opener{backends.Open, backends.OpenComm}

// open reads the job file, opens the device and makes the mesh on the communicator that goes with
// it: all ranks, or none.
func (e *Env) open(world comm.Comm, ranksOnNode int, o Options) error {
	// First of all: ranks that were started to do different things would meet in different
	// collectives.
	err := comm.Same(world, "command line", comm.Field{Name: "verb", Value: o.verb}, comm.Field{Name: "job file", Value: o.Path},
		comm.Field{Name: "--set", Value: fmt.Sprintf("%q", o.Sets)})
	if err != nil {
		return err
	}
	src, err := readOnRoot(world, o.Path)
	if err != nil {
		return err
	}
	e.source = string(src)
	e.Job, err = file.Parse(src, o.Path, o.Sets, os.LookupEnv)
	if err == nil {
		err = e.Job.Resolve(world.Size())
	}
	if err := comm.Agree(world, err); err != nil {
		return err
	}
	if e.opener = o.open; e.opener.device == nil {
		e.opener = ordinary
	}
	if err := e.openDevice(world, ranksOnNode); err != nil {
		return err
	}
	if err := e.openMesh(world, e.Job.Parallel.Ulysses); err != nil {
		e.Device.Close()
		return err
	}
	return nil
}

// openDevice opens the device and settles what is computed in.
func (e *Env) openDevice(world comm.Comm, ranksOnNode int) error {
	t := &e.Job.Device
	e.perNode = max(1, ranksOnNode)
	if e.threads = int(t.Threads); e.threads == 0 {
		e.threads = max(1, runtime.NumCPU()/max(1, ranksOnNode))
	}
	d, why, err := e.opener.device(backends.Choice{Backend: t.Backend, Threads: int(t.Threads), LocalRank: localRank(world), RanksOnNode: ranksOnNode,
		Deterministic: t.Deterministic})
	if err == nil {
		e.Device = d
		e.Compute, err = e.Job.ComputeType(d.Info())
	}
	if err = comm.Agree(world, err); err == nil {
		info := d.Info()
		err = comm.Same(world, "device",
			comm.Field{Name: "kind (say which with device.backend)", Value: info.Kind},
			comm.Field{Name: "kernels (pin with ULYSSES_ISA, or ULYSSES_KERNEL on a GPU)", Value: info.KernelsIn(e.Compute)})
	}
	if err != nil {
		if d != nil {
			d.Close()
		}
		return err
	}
	e.free = proc.FreeMemory() / int64(max(1, ranksOnNode))
	info := d.Info()
	text := fmt.Sprintf("device: %s %s, kernels %s, computing in %s", info.Kind, info.Name, info.Kernels, file.DTypeName(e.Compute))
	if why != "" {
		text += ": " + why
	}
	e.Log.Info().Msg(text)
	return nil
}

// openMesh makes the mesh of the job on these ranks, with the communicator that the device's
// tensors travel by.
func (e *Env) openMesh(host comm.Comm, ulysses int64) error {
	under := host
	var err error
	// a communicator of the device takes the one under it along when it ends
	if e.Device.Info().Place != tensor.Host {
		if under, err = host.Split(0, host.Rank()); err != nil {
			return err
		}
	}
	c, why, err := e.opener.comm(e.Device, under, e.Job.Device.Comm)
	if err = comm.Agree(host, err); err != nil {
		return err
	}
	if c != host || why != "" {
		if !strings.HasPrefix(why, c.Kind()) {
			why = c.Kind() + ": " + why
		}
		e.Log.Info().Msg("communicator: " + why)
	}
	e.layered = c != host
	e.Mesh, err = comm.NewMesh(c, int(ulysses), int(e.Job.Parallel.Ring), e.Ledger, e.Clock, e.Watch)
	return err
}

// leave gives up the communicator of the device, before memory that peers may have mapped is given
// back. All ranks come here, with an error or without, but one that is alone with its error; after
// an error nothing is waited for.
func (e *Env) leave(err error) error {
	if !e.layered || e.alone {
		return err
	}
	e.layered = false
	if any := comm.Agree(e.world, err); any != nil {
		if err == nil {
			err = any
		}
		return err
	}
	return e.Mesh.Close()
}

// localRank is this rank among those of its node.
func localRank(world comm.Comm) int {
	if world.Kind() == "local" {
		return world.Rank()
	}
	return slurm.Env().LocalRank
}

// onOneRank is the same job for this rank alone: one rank takes all sequences of the global batch,
// one micro-batch after another.
func (e *Env) onOneRank() (*Env, error) {
	j := *e.Job
	j.Parallel.Ulysses, j.Parallel.Ring, j.Data.GlobalBatch = 1, 1, 0
	j.Data.Accumulate = e.Job.Mesh.GlobalBatch / j.Data.Batch
	j.Device.Comm = "auto"                // among one rank there is nothing to choose
	j.Memory.Device, j.Memory.Host = 0, 0 // limits of a rank among many
	if err := j.Resolve(1); err != nil {
		return nil, err
	}
	one := *e
	one.Job, one.Ledger, one.Clock, one.Watch = &j, comm.NewLedger(), clock.New(), nil
	one.Log = one.Log.Level(zerolog.ErrorLevel)
	one.world = comm.Local(1)[0]
	return &one, one.openMesh(one.world, 1)
}
