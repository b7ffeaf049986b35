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

// Whether CUDA has a way between two processes shows when it is used: containers, slices of GPUs
// and drivers differ. So a communicator is proved when it is made, with memory and events, before
// anything depends on it.

// ipcProof is memory of a rank with a text in it that only that rank knows, for others to find.
type ipcProof struct {
	Handle []byte
	Offset int64
	Text   []byte
}

// refused is the failure of what a machine may have no way for, though its GPUs work.
func refused(what string, err error) error {
	return status.Errorf(status.Unsupported, "device.comm = \"ipc\": processes do not reach each other's memory here: CUDA %s: %w: containers must share the host's IPC "+
		"and PID namespaces, and a slice of a GPU (MIG) cannot; else use \"nccl\" or \"mpi\"", what, err)
}

// proof writes a text into this rank's scratch, behind which ready is recorded: nobody waits for it
// here.
func (c *ipc) proof() (p ipcProof, err error) {
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
		return p, refused("gives no handles of it", err)
	}
	p.Offset = int64(offset)
	return p, nil
}

// prove finds the text of rank j, behind its event: where CUDA has no way between two processes, it
// is known before the first exchange. The scratch is one of the small allocations, of which CUDA
// has several in one piece of memory. All meet again before anybody writes over it.
func (c *ipc) prove(j int, p ipcProof) error {
	if c.peers[j].here {
		return nil
	}
	if len(p.Handle) != handleBytes || len(p.Text) == 0 {
		return status.Errorf(status.Comm, "rank %d shows no memory: all ranks must run the same program", j)
	}
	if err := c.await(c.peers[j].ready); err != nil {
		return refused("does not wait for their events", err)
	}
	base, err := c.base(c.peers[j].process, p.Handle)
	if err != nil {
		return refused(fmt.Sprintf("does not map that of rank %d", j), err)
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
		return refused("maps it", fmt.Errorf("rank %d has %q in it, and %q was found", j, p.Text, found))
	}
	return nil
}
