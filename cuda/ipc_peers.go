package cuda

// #include "bridge.h"
import "C"

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// process tells this process from all others, of other containers on this node, too.
var process = rand.Text()

// Machine is what ranks compare to find those that run on one machine: the host's name and, where
// there is one, the id of its boot.
func Machine() string {
	name, _ := os.Hostname()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return name + " " + strings.TrimSpace(string(boot))
}

// card is what a rank says of itself when a communicator is made.
type card struct {
	Process, Machine string
	Room             string // rank 0's name for what its communicator's ranks in one process share
	Ready, Done      ipcEvent
	Proof            ipcProof // of processes alone
	Failed           string   // why it cannot take part
	Code             status.Code
}

// ipcEvent is an event as others find it: by address in the same process, else by handle.
type ipcEvent struct {
	Address uintptr
	Handle  []byte
}

// peer is another rank, or this one.
type peer struct {
	here        bool   // in this process
	process     string // which
	ready, done *C.uly_event
	// that it has read what was sent to it (sendRecv); nil before the first
	read *C.uly_event
}

func newIPC(d *Device, host comm.Comm) (transport, error) {
	n := host.Size()
	if n > MaxRanks {
		return nil, status.Errorf(status.Unsupported, "device.comm = \"ipc\": %d ranks: at most %d are built: use \"nccl\"", n, MaxRanks)
	}
	own := card{Process: process, Machine: Machine(), Room: rand.Text()}
	cards, err := gatherCards(host, own)
	if err != nil {
		return nil, err
	}
	near := true
	for j, k := range cards {
		near = near && k.Process == process
		if k.Machine != cards[0].Machine {
			return nil, status.Errorf(status.Unsupported, "device.comm = \"ipc\": ranks 0 and %d are on different machines (%s, %s): use \"nccl\" or \"mpi\"",
				j, cards[0].Machine, k.Machine)
		}
	}
	c := &ipc{host: host, me: host.Rank(), peers: make([]peer, n), pairs: make([]*event, n), receipts: make([]byte, 2*receiptBytes), mine: newPacket(n), bytes: make([]int64, 3*n), at: make([]uintptr, n)}
	c.all = make([]byte, n*len(c.mine.raw))
	c.room = roomOf(cards[0].Room)
	for j := range n {
		c.bytes[j] = int64(len(c.mine.raw))
	}
	if err = c.prepare(d, !near, &own); err != nil {
		own.Failed, own.Code = err.Error(), status.Of(err)
	}
	cards, gatherErr := gatherCards(host, own)
	if err == nil {
		err = gatherErr
	}
	for j, k := range cards {
		if err == nil && k.Failed != "" {
			err = status.Errorf(k.Code, "rank %d: %s", j, k.Failed)
		}
	}
	for j := 0; j < n && err == nil; j++ {
		err = c.meetPeer(j, cards[j])
	}
	for j := 0; j < n && err == nil; j++ {
		err = c.prove(j, cards[j].Proof)
	}
	return c, err // also of a part: all ranks have one, and end it together
}

// prepare makes what the rank itself needs.
func (c *ipc) prepare(d *Device, shared bool, own *card) (err error) {
	if c.commStream, err = newCommStream(d); err != nil {
		return err
	}
	if c.ready, err = d.newEvent(shared); err != nil {
		return err
	}
	if c.done, err = d.newEvent(shared); err != nil {
		return err
	}
	if c.scratch, err = d.Alloc(smallReduce); err != nil {
		return err
	}
	c.maps, c.mapped = mappingsOf(d), map[mapping]uintptr{}
	if own.Ready, err = d.show(c.ready, shared); err != nil {
		return refused("makes no events for them", err)
	}
	if own.Done, err = d.show(c.done, shared); err != nil || !shared {
		return err
	}
	own.Proof, err = c.proof()
	return err
}

func gatherCards(host comm.Comm, own card) ([]card, error) {
	text, err := json.Marshal(own)
	if err != nil {
		return nil, err
	}
	texts, err := comm.GatherBytes(host, text)
	if err != nil {
		return nil, err
	}
	cards := make([]card, len(texts))
	for j := range texts {
		if err := json.Unmarshal(texts[j], &cards[j]); err != nil {
			return nil, status.Errorf(status.Comm, "rank %d: %w: all ranks must run the same program", j, err)
		}
	}
	return cards, nil
}

// show is how others find an event.
func (d *Device) show(e *event, shared bool) (ipcEvent, error) {
	x := ipcEvent{Address: uintptr(unsafe.Pointer(e.e))}
	if !shared {
		return x, nil
	}
	x.Handle = make([]byte, handleBytes)
	return x, d.result(C.plug_event_handle(d.table, d.d, e.e, (*C.char)(unsafe.Pointer(&x.Handle[0]))))
}

// find is the event of another rank as this device waits for it.
func (d *Device) find(x ipcEvent, here bool) (*C.uly_event, error) {
	if here {
		return (*C.uly_event)(pointer(x.Address)), nil
	}
	if len(x.Handle) != handleBytes {
		return nil, status.Errorf(status.Comm, "an event of another process came without its handle")
	}
	var e *C.uly_event
	return e, d.result(C.plug_event_open(d.table, d.d, (*C.char)(unsafe.Pointer(&x.Handle[0])), &e))
}

func (c *ipc) meetPeer(j int, k card) (err error) {
	p := &c.peers[j]
	p.here, p.process = k.Process == process, k.Process
	if p.ready, err = c.d.find(k.Ready, p.here); err == nil {
		p.done, err = c.d.find(k.Done, p.here)
	}
	if err != nil {
		return refused(fmt.Sprintf("does not open the events of rank %d", j), err)
	}
	return nil
}

// close gives back the events that were opened.
func (p *peer) close(d *Device) {
	for _, e := range []*C.uly_event{p.ready, p.done, p.read} {
		if e != nil && !p.here {
			C.plug_event_destroy(d.table, d.d, e)
		}
	}
	p.ready, p.done, p.read = nil, nil, nil
}

// locate writes into the packet where this rank's tensor lies.
func (c *ipc) locate(t tensor.Tensor) error {
	if t.IsNil() || t.Bytes() == 0 {
		return nil
	}
	c.mine.setLong(packetAddress, int64(number(t.Data)))
	for _, p := range c.peers {
		if !p.here {
			var offset, bytes C.int64_t
			if err := c.d.result(C.plug_memory_handle(c.d.table, c.d.d, t.Data, (*C.char)(unsafe.Pointer(&c.mine.raw[packetHandle])), &offset, &bytes)); err != nil {
				return err
			}
			c.mine.setLong(packetOffset, int64(offset))
			c.mine.setLong(packetKnown, 1)
			return nil
		}
	}
	return nil
}

// reach is where rank j's tensor lies for this rank; 0 where it has none.
func (c *ipc) reach(j int, p packet) (uintptr, error) {
	if c.peers[j].here {
		return uintptr(p.long(packetAddress)), nil
	}
	if p.long(packetKnown) == 0 {
		return 0, nil
	}
	base, err := c.base(c.peers[j].process, p.raw[packetHandle:packetHandle+handleBytes])
	return base + uintptr(p.long(packetOffset)), err
}

// close waits for the communication stream, which has waited for all who read this rank's memory,
// and for the peers: at first for those who have still to enqueue their waits for its events, in
// the end for those who still have its memory mapped, so that it may be freed from here on. All
// ranks meet, whatever has failed on one, also of a communicator that never was whole.
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
	for _, e := range append(c.pairs, c.ready, c.done) {
		if e != nil {
			e.Close()
		}
	}
	if c.scratch != nil {
		c.scratch.Free()
		c.scratch = nil
	}
	c.room.give()
	return err
}

// as in kernels.h
const _ = uint(C.ULY_MAX_RANKS-MaxRanks) + uint(MaxRanks-C.ULY_MAX_RANKS) + uint(C.ULY_HANDLE-handleBytes) + uint(handleBytes-C.ULY_HANDLE)
