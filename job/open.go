package job

import (
	"fmt"
	"os"
	"strings"

	"github.com/rs/zerolog"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/proc"
	vers "ulysses/internal/version"
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/job/plan"
	"ulysses/tensor"
)

// opener opens the device of a rank, and the communicator for its tensors on top of one for host
// memory. why is the reason of the choice, if the job leaves it open. Tests replace the functions.
type opener struct {
	device func(backends.Choice) (d device.Device, why string, err error)
	comm   func(d device.Device, host comm.Comm, policy string) (c comm.Comm, why string, err error)
	nodes  func(c comm.Comm) ([]int, error) // the node of each rank; nil = comm.Nodes
}

// defaultOpener opens the devices and communicators of package backends.
var defaultOpener = opener{backends.Open, backends.OpenComm, nil}

// open reads the job file, opens the device and makes the mesh. Collective: all ranks succeed or
// return the same error.
func (e *Env) open(r launch.Rank, o Options) error {
	world := r.World
	if err := sameCommand(world, &o, comm.Field{Name: "program", Value: vers.Build()}); err != nil {
		return err
	}
	src, err := readOnRoot(world, o.Path)
	if err != nil {
		return err
	}
	e.source = string(src)
	e.Job, err = file.Parse(src, o.Path, o.Sets, os.LookupEnv)
	if err == nil {
		e.Job.ByVerb = o.verb == "eval" || o.verb == "logits"
		err = e.Job.Resolve(world.Size())
	}
	if err := comm.Agree(world, err); err != nil {
		return err
	}
	if err := e.setTimeout(); err != nil {
		return err
	}
	if e.opener = o.open; e.opener.device == nil {
		e.opener = defaultOpener
	}
	if err := e.openDevice(r); err != nil {
		return err
	}
	if err := e.chooseMesh(world); err != nil {
		e.Device.Close()
		return err
	}
	if err := e.openMesh(world); err != nil {
		e.Device.Close()
		return err
	}
	return nil
}

// setTimeout applies parallel.timeout to the calls that follow. The CUDA plug-in reads the
// environment.
func (e *Env) setTimeout() (err error) {
	word := e.Job.Parallel.Timeout
	if word == "auto" || os.Getenv("ULYSSES_TIMEOUT") != "" {
		return nil
	}
	if e.timeout, err = launch.Timeout(word); err != nil {
		return err
	}
	e.Watch.SetLimit(e.timeout)
	if e.world.Kind() == "local" { // goroutine ranks: the process may run other jobs
		return nil
	}
	return os.Setenv("ULYSSES_TIMEOUT", e.timeout.String())
}

// sameCommand is the first check: ranks with different commands would call different collectives.
// more are further fields to compare. Collective.
func sameCommand(world comm.Comm, o *Options, more ...comm.Field) error {
	fields := []comm.Field{{Name: "verb", Value: o.verb}, {Name: "job file", Value: o.Path},
		{Name: "arguments", Value: fmt.Sprintf("%q %q", o.words, o.compare)},
		{Name: "--set", Value: fmt.Sprintf("%q", o.Sets)}}
	return comm.Same(world, "command line", append(fields, more...)...)
}

// openDevice opens the device and chooses the compute type.
func (e *Env) openDevice(r launch.Rank) error {
	t, world := &e.Job.Device, r.World
	_, own, err := findPlaces(r, t.Threads)
	if err != nil {
		return err
	}
	e.seat = own
	d, why, err := e.opener.device(backends.Choice{Backend: t.Backend, Threads: e.threads, LocalRank: e.local,
		RanksOnNode: e.perNode, Deterministic: t.Deterministic})
	if err == nil {
		e.Device = d
		e.Compute, err = e.Job.ComputeType(d.Info())
	}
	if err = comm.Agree(world, err); err == nil {
		err = e.checkPlaces(world)
	}
	if err == nil {
		info := d.Info()
		err = comm.Same(world, "device",
			comm.Field{Name: "kind (set device.backend)", Value: info.Kind},
			comm.Field{Name: "kernels (set ULYSSES_ISA, or ULYSSES_KERNEL on a GPU)", Value: info.KernelsIn(e.Compute)})
	}
	if err != nil {
		if d != nil {
			d.Close()
		}
		return err
	}
	e.freeHost = proc.FreeMemory() / int64(e.perNode)
	info := d.Info()
	text := fmt.Sprintf("device: %s %s, kernels %s, computing in %s", info.Kind, info.Name, info.Kernels,
		file.DTypeName(e.Compute))
	if why != "" {
		text += ": " + why
	}
	e.Log.Info().Msg(text)
	for _, note := range variableNotes(os.Environ(), info.Kind) {
		e.Log.Warn().Msg(note)
	}
	return nil
}

// openHost opens this rank's CPU threads.
func (e *Env) openHost() (assembly.HostStep, error) {
	d, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: e.threads})
	return d, err
}

// chooseMesh chooses the mesh of a job that leaves it open. Rank 0 chooses, because the memory of
// ranks differs. Collective.
func (e *Env) chooseMesh(world comm.Comm) error {
	if !plan.LeavesMeshOpen(e.Job, world.Size()) {
		return nil
	}
	degrees := make([]int64, 4) // Ulysses, Ring, Replicas, Gather; 0 = not chosen
	var err error
	if world.Rank() == 0 {
		var c *plan.Choice
		if c, err = plan.ChooseHere(e.Job, world.Size(), e.Device, e.Compute, e.perNode, e.freeHost); c != nil {
			e.Log.Info().Msg(c.Text)
			degrees[0], degrees[1], degrees[2] = c.Mesh.Ulysses, c.Mesh.Ring, c.Mesh.Replicas
			if c.Mesh.Gather {
				degrees[3] = 1
			}
		}
	}
	if err := comm.Agree(world, err); err != nil {
		return err
	}
	if err := world.Broadcast(nil, tensor.OfInt64(degrees, 4), 0); err != nil || degrees[0] == 0 {
		return err
	}
	e.Job.Choose(file.Mesh{World: int64(world.Size()), Ulysses: degrees[0], Ring: degrees[1], Replicas: degrees[2],
		Gather: degrees[3] == 1})
	return comm.Agree(world, e.Job.Resolve(world.Size()))
}

// openMesh makes the mesh of the job, with the communicator for the device's tensors.
func (e *Env) openMesh(host comm.Comm) error {
	under := host
	var err error
	// a communicator of the device closes the one below it
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
	if e.Mesh, err = comm.NewMesh(c, int(e.Job.Mesh.Ulysses), int(e.Job.Mesh.Ring), e.Ledger, e.Clock,
		e.Watch); err != nil {
		return err
	}
	if err = e.Mesh.DivideExperts(int(e.Job.Mesh.Experts), e.Ledger, e.Clock, e.Watch); err != nil {
		return err
	}
	if err = backends.ShareFree(host, e.Device); err != nil {
		return err
	}
	nodes := e.opener.nodes
	if nodes == nil {
		nodes = comm.Nodes
	}
	e.Mesh.Links = plan.TypicalLinks
	e.warnOfPlaces()
	e.Mesh.Nodes, err = nodes(e.Mesh.Seq)
	return err
}

// leave closes the communicator of the device before memory is freed that other ranks may have
// mapped. All ranks call it, with an error or without, except a rank whose error is its own. After
// an error it does not wait for collectives. Collective.
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

// onOneRank returns the same job on this rank alone, which processes all sequences of the global
// batch, one micro-batch after the other.
func (e *Env) onOneRank() (*Env, error) {
	j := *e.Job
	j.Parallel.Ulysses, j.Parallel.Ring, j.Parallel.Experts, j.Data.GlobalBatch = 1, 1, 0, 0
	j.Data.Accumulate = e.Job.Mesh.GlobalBatch / j.Data.Batch
	j.Device.Comm = "auto"                // one rank needs no communicator of the device
	j.Memory.Device, j.Memory.Host = 0, 0 // these limits are for a rank of many
	// one rank has the states of all, and their results do not depend on where they are
	j.Memory.Optimizer, j.Memory.Gradients = "auto", "auto"
	if err := j.Resolve(1); err != nil {
		return nil, err
	}
	one := *e
	one.Job, one.Ledger, one.Clock, one.Watch = &j, comm.NewLedger(), clock.New(), nil
	one.Log = one.Log.Level(zerolog.ErrorLevel)
	one.world, one.local = comm.Local(1)[0], 0
	return &one, one.openMesh(one.world)
}
