package cuda

// #include "bridge.h"
import "C"

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// process identifies this process among all processes, also in other containers.
var process = rand.Text()

// Process returns a text that is equal for ranks of one process and for no others.
func Process() string { return process }

// Machine returns a text that is equal for ranks on one machine: the name of the host and, if there
// is one, its boot id.
func Machine() string {
	name, _ := os.Hostname()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return name + " " + strings.TrimSpace(string(boot))
}

// rankInfo has what a rank sends to the others when a communicator is made.
type rankInfo struct {
	Process, Machine string
	GPU              int    // its ordinal in the process
	Group            string // key of the processGroup; rank 0's is used
	Ready, Done      []ipcEvent
	Probe            accessProbe // empty if all ranks are in one process
	Failed           bool        // this rank has an error
}

// ipcEvent identifies an event for other ranks: by address in the same process, else by handle.
type ipcEvent struct {
	Address uintptr
	Handle  []byte
}

// peer is a rank of the communicator, also this one.
type peer struct {
	sameProcess bool
	process     string
	ready, done []*C.uly_event
	read        []*C.uly_event // it has read a message of SendRecv; nil before the first message with an event
}

func newIPC(d *Device, host comm.Comm, use streamUse) (transport, error) {
	n := host.Size()
	if n > MaxRanks {
		return nil, status.Errorf(status.Unsupported,
			"device.comm = \"ipc\": %d ranks; at most %d are supported; set device.comm = \"nccl\"", n, MaxRanks)
	}
	own := rankInfo{Process: process, Machine: Machine(), GPU: d.more.Ordinal, Group: rand.Text()}
	infos, err := comm.GatherJSON(host, "device.comm = \"ipc\"", own)
	if err != nil {
		return nil, err
	}
	oneProcess := true
	for j, k := range infos {
		oneProcess = oneProcess && k.Process == process
		if k.Machine != infos[0].Machine {
			return nil, status.Errorf(status.Unsupported,
				"device.comm = \"ipc\": ranks 0 and %d are on different machines (%s, %s); set device.comm to \"nccl\" or \"mpi\"",
				j, infos[0].Machine, k.Machine)
		}
	}
	c := &ipc{host: host, me: host.Rank(), peers: make([]peer, n), pairs: make([]pairEvents, n),
		receipts: make([]byte, 2*receiptBytes), own: newPacket(n), bytes: make([]int64, 3*n), addrs: make([]uintptr, n)}
	c.all = make([]byte, n*len(c.own.raw))
	c.group = joinGroup(infos[0].Group)
	for j := range n {
		c.bytes[j] = int64(len(c.own.raw))
	}
	err = c.prepare(d, use, !oneProcess, &own)
	own.Failed = err != nil
	infos, gatherErr := comm.GatherJSON(host, "device.comm = \"ipc\"", own)
	if err = cmp.Or(err, gatherErr); slices.ContainsFunc(infos, func(k rankInfo) bool { return k.Failed }) {
		return c, err // newComm returns the error of the rank that has failed
	}
	for j := 0; j < n && err == nil; j++ {
		err = c.openPeer(j, infos[j])
	}
	for j := 0; j < n && err == nil; j++ {
		err = c.checkAccess(j, infos[j].Probe)
	}
	if comm.Agree(host, err) == nil && !oneProcess {
		err = c.proveEvents()
	}
	return c, err // with an error, newComm closes c on all ranks together
}

// prepare allocates the events and memory of this rank and describes them in own. shared: ranks are
// in several processes.
func (c *ipc) prepare(d *Device, use streamUse, shared bool, own *rankInfo) (err error) {
	if c.commStream, err = newCommStream(d, use); err != nil {
		return err
	}
	if c.ipcEvents, err = d.newIPCEvents(shared); err != nil {
		return err
	}
	if c.scratch, err = d.Alloc(ipcScratch); err != nil {
		return err
	}
	c.maps, c.mapped = mappingsOf(d), map[mapping]*mapped{}
	if own.Ready, err = d.exportEvents(c.ready, shared); err != nil {
		return noAccess("cannot export events", err)
	}
	if own.Done, err = d.exportEvents(c.done, shared); err != nil || !shared {
		return err
	}
	own.Probe, err = c.writeProbe()
	return err
}

// exportEvent returns the description of an event for other ranks.
func (d *Device) exportEvent(e *event, shared bool) (ipcEvent, error) {
	x := ipcEvent{Address: uintptr(unsafe.Pointer(e.e))}
	if !shared {
		return x, nil
	}
	x.Handle = make([]byte, handleBytes)
	return x, d.result(C.plug_event_handle(d.table, d.d, e.e, (*C.char)(unsafe.Pointer(&x.Handle[0]))))
}

func (d *Device) exportEvents(events []*event, shared bool) ([]ipcEvent, error) {
	list := make([]ipcEvent, len(events))
	for i, e := range events {
		var err error
		if list[i], err = d.exportEvent(e, shared); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// importEvent returns another rank's event, for which this device can wait.
func (d *Device) importEvent(x ipcEvent, sameProcess bool) (*C.uly_event, error) {
	if sameProcess {
		return (*C.uly_event)(pointer(x.Address)), nil
	}
	if len(x.Handle) != handleBytes {
		return nil, status.Errorf(status.Comm,
			"an event of another process has no handle; start all ranks with the same program")
	}
	var e *C.uly_event
	return e, d.result(C.plug_event_open(d.table, d.d, (*C.char)(unsafe.Pointer(&x.Handle[0])), &e))
}

func (d *Device) importEvents(list []ipcEvent, sameProcess bool) (events []*C.uly_event, err error) {
	for _, x := range list {
		e, err := d.importEvent(x, sameProcess)
		if err != nil {
			return events, err
		}
		events = append(events, e)
	}
	return events, nil
}

// openPeer imports the events of rank j, and lets this GPU access its memory if it is a rank of
// this process.
func (c *ipc) openPeer(j int, k rankInfo) (err error) {
	p := &c.peers[j]
	if p.sameProcess, p.process = k.Process == process, k.Process; p.sameProcess {
		if err := c.accessGPU(j, k.GPU); err != nil {
			return err
		}
	}
	if len(k.Ready) != len(c.ready) || len(k.Done) != len(c.done) {
		return status.Errorf(status.Comm,
			"rank %d has %d and %d events, this rank %d; start all ranks with the same program", j, len(k.Ready),
			len(k.Done), len(c.ready))
	}
	p.read = make([]*C.uly_event, len(c.ready))
	if p.ready, err = c.d.importEvents(k.Ready, p.sameProcess); err == nil {
		p.done, err = c.d.importEvents(k.Done, p.sameProcess)
	}
	if err != nil {
		return noAccess(fmt.Sprintf("cannot open the events of rank %d", j), err)
	}
	return nil
}

// close destroys the imported events of other processes.
func (p *peer) close(d *Device) {
	for _, e := range slices.Concat(p.ready, p.done, p.read) {
		if e != nil && !p.sameProcess {
			C.plug_event_destroy(d.table, d.d, e)
		}
	}
	p.ready, p.done, p.read = nil, nil, nil
}

// writeLocation writes the location of this rank's tensor to the packet.
func (c *ipc) writeLocation(t tensor.Tensor) error {
	if t.IsNil() || t.Bytes() == 0 {
		return nil
	}
	c.own.setLong(packetAddress, int64(address(t.Data)))
	for _, p := range c.peers {
		if !p.sameProcess {
			a, err := c.d.exportMemory(t.Data, c.own.raw[packetHandle:packetHandle+handleBytes])
			if err != nil {
				return err
			}
			c.own.setLong(packetOffset, a.offset)
			c.own.setLong(packetGeneration, int64(a.generation))
			c.own.setLong(packetKnown, 1)
			return nil
		}
	}
	return nil
}

// addressOf returns the address of rank j's tensor in this process; 0 if it is absent.
func (c *ipc) addressOf(j int, p packet) (uintptr, error) {
	if c.peers[j].sameProcess {
		return uintptr(p.long(packetAddress)), nil
	}
	if p.long(packetKnown) == 0 {
		return 0, nil
	}
	base, err := c.base(c.peers[j].process, p.raw[packetHandle:packetHandle+handleBytes],
		uint64(p.long(packetGeneration)))
	return base + uintptr(p.long(packetOffset)), err
}

// close waits for the communication stream, which waits for all ranks that read this rank's memory.
// The first barrier ensures that all ranks have enqueued their waits for its events, the second
// that they have unmapped its memory, so that the caller may free it. All ranks call close, also if
// a rank has failed or the communicator is incomplete.
func (c *ipc) close() error {
	var err error
	note := func(e error) {
		if err == nil {
			err = e
		}
	}
	note(c.host.Barrier())
	if c.commStream != nil {
		note(c.commStream.close())
		for i := range c.peers {
			c.peers[i].close(c.d)
		}
		c.unmap()
	}
	note(c.host.Barrier())
	for _, p := range c.pairs {
		for _, e := range p.read {
			e.Close()
		}
	}
	c.ipcEvents.close()
	if c.scratch != nil {
		c.scratch.Free()
		c.scratch = nil
	}
	c.group.release()
	return err
}

// This compiles only if the constants are equal in kernels.h.
const _ = uint(C.ULY_MAX_RANKS-MaxRanks) + uint(MaxRanks-C.ULY_MAX_RANKS) + uint(C.ULY_HANDLE-handleBytes) +
	uint(handleBytes-C.ULY_HANDLE)
