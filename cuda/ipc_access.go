package cuda

// #include "bridge.h"
import "C"

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"unsafe"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// CUDA IPC between two processes may fail on containers, GPU slices (MIG) and some drivers, and
// only a test shows it. Therefore each rank tests memory and events of every other rank when a
// communicator is made.

// accessProbe describes memory of a rank that contains a random text. Another rank that reads the
// text can reach the memory.
type accessProbe struct {
	Handle []byte
	Offset int64
	Text   []byte
}

// noAccess returns the error of a machine on which GPUs work but CUDA IPC does not.
func noAccess(what string, err error) error {
	return status.Errorf(status.Unsupported, "device.comm = \"ipc\": processes cannot access each other's GPU memory: CUDA %s: %w; set device.comm to \"nccl\" or \"mpi\", "+
		"or let containers share the host's IPC and PID namespaces (MIG slices do not support ipc)", what, err)
}

// writeProbe writes a random text to this rank's scratch and records the event ready behind it. It
// does not wait.
func (c *ipc) writeProbe() (p accessProbe, err error) {
	p.Text = []byte(rand.Text())
	own := bytesOf(p.Text)
	there := tensor.Of(c.scratch.Pointer(), own.DType, own.Numel())
	there.Where = tensor.CUDA
	if err := c.d.Copy(c.s, there, own); err != nil {
		return p, err
	}
	if err := c.s.Record(c.ready); err != nil {
		return p, err
	}
	p.Handle = make([]byte, handleBytes)
	var offset, size C.int64_t
	if err := c.d.result(C.plug_memory_handle(c.d.table, c.d.d, c.scratch.Pointer(), (*C.char)(unsafe.Pointer(&p.Handle[0])), &offset, &size)); err != nil {
		return p, noAccess("cannot export memory", err)
	}
	p.Offset = int64(offset)
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
	if err := c.waitRemote(c.peers[j].ready); err != nil {
		return noAccess(fmt.Sprintf("cannot wait for the events of rank %d", j), err)
	}
	base, err := c.base(c.peers[j].process, p.Handle)
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
