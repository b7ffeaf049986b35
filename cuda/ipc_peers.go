package cuda

// #include "bridge.h"
import "C"

import (
	"crypto/rand"
	"encoding/json"
	"os"
	"strings"
	"sync"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// process tells this process from all others, of other containers on this node, too.
var process = rand.Text()

// Machine is what ranks compare to find those that run on one machine: the host's name and, where there is one, the id of its boot.
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
	Failed           bool
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
	read        *C.uly_event // that it has read what was sent to it (sendRecv); nil before the first
}

func newIPC(d *Device, host comm.Comm) (carrier, error) {
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
	err = c.prepare(d, !near, &own)
	own.Failed = err != nil
	cards, gatherErr := gatherCards(host, own)
	if err == nil {
		err = gatherErr
	}
	for j, k := range cards {
		if err == nil && k.Failed {
			err = status.Errorf(status.Device, "rank %d cannot make its part of the communicator", j)
		}
	}
	for j := 0; j < n && err == nil; j++ {
		err = c.meetPeer(j, cards[j])
	}
	if err != nil {
		if c.lane == nil {
			c.room.give()
		} else {
			c.close(false)
		}
		return nil, err
	}
	return c, nil
}

// prepare makes what the rank itself needs.
func (c *ipc) prepare(d *Device, shared bool, own *card) (err error) {
	if c.lane, err = newLane(d, shared); err != nil {
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
		return err
	}
	own.Done, err = d.show(c.done, shared)
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
	if p.ready, err = c.d.find(k.Ready, p.here); err != nil {
		return err
	}
	p.done, err = c.d.find(k.Done, p.here)
	return err
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

// mappings is the memory of other processes that one device has mapped, for all its communicators, because an allocation is mapped once.
// A communicator keeps what it has used until it is closed: tensors that are exchanged live as long as that, as arenas do.
type mappings struct {
	d     *Device
	users int
	at    map[mapping]*mapped
}

type mapping struct {
	process string
	handle  [handleBytes]byte
}

type mapped struct {
	base  uintptr
	users int
}

var deviceMappings = struct {
	sync.Mutex
	by map[*Device]*mappings
}{by: map[*Device]*mappings{}}

func mappingsOf(d *Device) *mappings {
	deviceMappings.Lock()
	defer deviceMappings.Unlock()
	m := deviceMappings.by[d]
	if m == nil {
		m = &mappings{d: d, at: map[mapping]*mapped{}}
		deviceMappings.by[d] = m
	}
	m.users++
	return m
}

// base is where the allocation of a handle begins, mapped by this communicator or now.
func (c *ipc) base(process string, handle []byte) (uintptr, error) {
	key := mapping{process: process}
	copy(key.handle[:], handle)
	if at, ok := c.mapped[key]; ok {
		return at, nil
	}
	m := c.maps.at[key]
	if m == nil {
		var p unsafe.Pointer
		if err := c.d.result(C.plug_memory_open(c.d.table, c.d.d, (*C.char)(unsafe.Pointer(&handle[0])), &p)); err != nil {
			return 0, err
		}
		m = &mapped{base: number(p)}
		c.maps.at[key] = m
	}
	m.users++
	c.mapped[key] = m.base
	return m.base, nil
}

// unmap gives back what this communicator alone still used.
func (c *ipc) unmap() {
	if c.maps == nil {
		return
	}
	for key := range c.mapped {
		m := c.maps.at[key]
		if m.users--; m.users == 0 {
			C.plug_memory_close(c.d.table, c.d.d, pointer(m.base))
			delete(c.maps.at, key)
		}
	}
	c.mapped = nil
	deviceMappings.Lock()
	defer deviceMappings.Unlock()
	if c.maps.users--; c.maps.users == 0 {
		delete(deviceMappings.by, c.d)
	}
	c.maps = nil
}

const _ = uint(C.ULY_MAX_RANKS-MaxRanks) + uint(MaxRanks-C.ULY_MAX_RANKS) + uint(C.ULY_HANDLE-handleBytes) + uint(handleBytes-C.ULY_HANDLE) // as in kernels.h
