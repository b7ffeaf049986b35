package cuda

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"ulysses/comm"
	"ulysses/tensor"
)

type ipcOp uint8

const (
	opFailed ipcOp = iota
	opAllToAll
	opAllGather
	opReduceScatter
	opAllReduce
	opBroadcast
	opSendRecv
)

var ipcNames = [...]string{"nothing", "AllToAll", "AllGather", "ReduceScatter", "AllReduce", "Broadcast", "SendRecv"}

// header has the fields that must be equal on all ranks.
type header struct {
	op    ipcOp
	dtype tensor.DType
	how   comm.Op
	root  int
	unit  int64 // bytes of a row or of the whole, or elements
}

func (h header) name() string { return ipcNames[h.op] }

func (h header) String() string {
	switch h.op {
	case opAllReduce:
		return fmt.Sprintf("AllReduce of %v[%d], reduction %d", h.dtype, h.unit, h.how)
	case opBroadcast:
		return fmt.Sprintf("Broadcast of %d bytes from %d", h.unit, h.root)
	case opAllGather, opReduceScatter:
		return fmt.Sprintf("%s of rows of %d bytes of %v", h.name(), h.unit, h.dtype)
	}
	return h.name()
}

// handleBytes is ULY_HANDLE of kernels.h.
const handleBytes = 64

// packet is the message that a rank sends to the others in each call: a header, the location of its
// tensor, and the counts that it receives and sends, by rank.
type packet struct {
	raw  []byte
	size int
}

// Offsets in a packet.
const (
	packetOp         = 0 // and type, reduction, index of the event "ready"
	packetRoot       = 4
	packetUnit       = 8
	packetAddress    = 16 // for ranks of the same process
	packetOffset     = 24 // into the allocation, for others
	packetHandle     = 32 // of the allocation; packetKnown is 1 if it is set
	packetKnown      = packetHandle + handleBytes
	packetGeneration = packetKnown + 8 // the generation of the allocation
	packetRows       = packetGeneration + 8
)

func newPacket(size int) packet { return packet{make([]byte, packetRows+16*size), size} }

func (p packet) long(at int) int64       { return int64(binary.LittleEndian.Uint64(p.raw[at:])) }
func (p packet) setLong(at int, v int64) { binary.LittleEndian.PutUint64(p.raw[at:], uint64(v)) }

// write sets all fields but the location of the tensor.
func (p packet) write(h header, ready byte, recvRows, sendRows []int64) {
	clear(p.raw)
	p.raw[packetOp], p.raw[packetOp+1], p.raw[packetOp+2], p.raw[packetOp+3] = byte(h.op), byte(h.dtype),
		byte(h.how), ready
	binary.LittleEndian.PutUint32(p.raw[packetRoot:], uint32(h.root))
	p.setLong(packetUnit, h.unit)
	for j, n := range recvRows {
		p.setLong(packetRows+8*j, n)
	}
	for j, n := range sendRows {
		p.setLong(packetRows+8*(p.size+j), n)
	}
}

func (p packet) header() header {
	return header{op: ipcOp(p.raw[packetOp]), dtype: tensor.DType(p.raw[packetOp+1]), how: comm.Op(p.raw[packetOp+2]),
		root: int(int32(binary.LittleEndian.Uint32(p.raw[packetRoot:]))), unit: p.long(packetUnit)}
}

// readyIndex returns the index of the event "ready" in its rank's list.
func (p packet) readyIndex() byte { return p.raw[packetOp+3] }

// fail marks the packet of a rank that has failed.
func (p packet) fail()        { p.raw[packetOp] = byte(opFailed) }
func (p packet) failed() bool { return p.raw[packetOp] == byte(opFailed) }

func (p packet) received(from int) int64 { return p.long(packetRows + 8*from) }
func (p packet) sent(to int) int64       { return p.long(packetRows + 8*(p.size+to)) }

// sentBefore returns the bytes before the block for rank `to` in what this rank sends.
func (p packet) sentBefore(to int) int64 {
	var n int64
	for j := range to {
		n += p.sent(j)
	}
	return n
}

func (p packet) sameRows(q packet) bool { return bytes.Equal(p.raw[packetRows:], q.raw[packetRows:]) }
