package cuda

// #include "bridge.h"
import "C"

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"time"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// CUDA IPC between two processes may fail on containers, GPU slices (MIG) and some drivers, and
// only a test shows it. Therefore each rank tests memory and events of every other rank when a
// communicator is made.

// accessProbe describes memory of a rank that contains a random text. Another rank that reads the
// text can reach the memory.
type accessProbe struct {
	Handle     []byte
	Offset     int64
	Generation uint64
	Text       []byte
}

// noAccess returns the error of a machine on which GPUs work but CUDA IPC does not.
func noAccess(what string, err error) error {
	return status.Errorf(status.Unsupported,
		"device.comm = \"ipc\": processes cannot access each other's GPU memory: CUDA %s: %w; set device.comm to \"nccl\" or \"mpi\", "+
			"or let containers share the host's IPC and PID namespaces (MIG slices do not support ipc)", what, err)
}

// accessGPU lets kernels of this rank's GPU access the memory of rank j of this process. GPUs on
// PCIe may not support it, and a kernel that does so without support ends the process's work on
// its GPU.
func (c *ipc) accessGPU(j, ordinal int) error {
	var can C.int32_t
	err := c.d.result(C.plug_peer_access(c.d.table, c.d.d, C.int32_t(ordinal), &can))
	if err != nil || can != 0 {
		return err
	}
	return status.Errorf(status.Unsupported,
		"device.comm = \"ipc\": rank %d on GPU %d cannot access the memory of rank %d on GPU %d: the GPUs do not support it (nvidia-smi topo -p2p r); set device.comm to \"nccl\" or \"mpi\"",
		c.me, c.d.more.Ordinal, j, ordinal)
}

// writeProbe writes a random text to this rank's scratch and records the first event "ready" behind
// it. It does not wait.
func (c *ipc) writeProbe() (p accessProbe, err error) {
	p.Text = []byte(rand.Text())
	own := bytesOf(p.Text)
	there := tensor.Of(c.scratch.Pointer(), own.DType, own.Numel())
	there.Where = tensor.CUDA
	if err := c.d.Copy(c.s, there, own); err != nil {
		return p, err
	}
	if err := c.s.Record(c.ready[0]); err != nil {
		return p, err
	}
	p.Handle = make([]byte, handleBytes)
	a, err := c.d.exportMemory(c.scratch.Pointer(), p.Handle)
	if err != nil {
		return p, noAccess("cannot export memory", err)
	}
	p.Offset, p.Generation = a.offset, a.generation
	return p, nil
}

// checkAccess reads the text of rank j after its event ready. A barrier of all ranks follows before
// the scratch is overwritten.
func (c *ipc) checkAccess(j int, p accessProbe) error {
	if c.peers[j].sameProcess {
		return nil
	}
	if len(p.Handle) != handleBytes || len(p.Text) == 0 {
		return status.Errorf(status.Comm, "rank %d has sent no memory handle; start all ranks with the same program", j)
	}
	if err := c.waitRemote(c.peers[j].ready[0]); err != nil {
		return noAccess(fmt.Sprintf("cannot wait for the events of rank %d", j), err)
	}
	base, err := c.base(c.peers[j].process, p.Handle, p.Generation)
	if err != nil {
		return noAccess(fmt.Sprintf("cannot map the memory of rank %d", j), err)
	}
	found := make([]byte, len(p.Text))
	own := bytesOf(found)
	there := tensor.Of(pointer(base+uintptr(p.Offset)), own.DType, own.Numel())
	there.Where = tensor.CUDA
	if err := c.d.Copy(c.s, own, there); err != nil {
		return err
	}
	if err := c.s.Sync(); err != nil {
		return err
	}
	if !bytes.Equal(found, p.Text) {
		return noAccess("maps wrong memory", fmt.Errorf("rank %d wrote %q, and %q was read", j, p.Text, found))
	}
	return nil
}

// proofLimit is the time after which proveEvents has failed.
const proofLimit = 30 * time.Second

// proveEvents checks that events work when they are recorded again. It enqueues more calls than
// there are events of a kind, behind copies of pinned memory, which keep the GPU busy for some 0.3
// ms: the first waits are pending then. Each call gathers one number of each rank, and each rank
// writes its next number to the same address. A wait that ended with an earlier record would show
// an old number. If the GPUs wait for each other forever, only the end of the job helps.
// Collective.
func (c *ipc) proveEvents() error {
	watch := time.AfterFunc(proofLimit, func() {
		c.host.Abort(status.Device,
			fmt.Sprintf(
				"device.comm = \"ipc\": the GPUs wait for each other's events for longer than %v; set device.comm = \"mpi\"",
				proofLimit))
	})
	defer watch.Stop()
	n, calls := int64(len(c.peers)), int64(len(c.ready)+3)
	all := tensor.Of(c.scratch.Pointer(), tensor.U8, c.scratch.Bytes())
	all.Where = tensor.CUDA
	own, gathered, rows := all.At(0, tensor.F32, 1, 1), all.At(align, tensor.F32, calls*n, 1), make([]int64, n)
	for j := range rows {
		rows[j] = 1
	}
	stop, err := c.keepBusy()
	if err == nil {
		defer stop()
	}
	if comm.Agree(c.host, err) != nil { // before calls that all ranks make
		return err // nil if only other ranks have failed; newComm returns their error
	}
	for i := range calls {
		if err := c.d.Fill(c.s, own, float64(i*n+int64(c.me))); err != nil {
			return err
		}
		if err := c.AllGather(c.s, gathered.Slice(0, i*n, (i+1)*n), own, rows); err != nil {
			return err
		}
	}
	found := make([]float32, calls*n)
	if err := c.d.Copy(c.s, tensor.OfFloat32(found, calls*n, 1), gathered); err != nil {
		return err
	}
	if err := c.s.Sync(); err != nil {
		return err
	}
	for i, x := range found {
		if x != float32(i) {
			return noAccess("does not order events that are recorded again",
				fmt.Errorf("call %d read %v from rank %d, want %d", i/int(n), x, i%int(n), i))
		}
	}
	return nil
}

// keepBusy enqueues 16 copies of 1 MiB from pinned memory to the end of the scratch. stop frees the
// memory, after the copies.
func (c *ipc) keepBusy() (stop func(), err error) {
	const bytes = 1 << 20
	from, err := c.d.AllocHost(bytes)
	if err != nil {
		return nil, err
	}
	for range 16 {
		if err := c.copy(address(c.scratch.Pointer())+ipcScratch-bytes, address(from.Pointer()), bytes); err != nil {
			from.Free()
			return nil, err
		}
	}
	return from.Free, nil
}
