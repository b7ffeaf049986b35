package cuda

// #include "bridge.h"
import "C"

import (
	"cmp"
	"encoding/binary"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// SendRecv between two ranks: the sender sends a packet with the location of the message. The
// receiver enqueues the copy, records an event behind it, and sends a receipt that identifies the
// event. The sender's communication stream waits for this event. Each pair of ranks has its own
// events, which are recorded in turn (ipcEvents): the receiver records the event of a message again
// when it has received the sender's next message, and the sender had then waited for the record.

// pairEvents are the events of the messages from one rank.
type pairEvents struct {
	read     []*event // created with the first messages
	messages int
}

// receiptBytes is the length of a receipt: whether the receiver has read the message (1 byte: 0 if
// the size is wrong, receiptRead or receiptFailed), the index of the event, the address of the
// event, its handle. The sender keeps the event that the first receipt with an index identifies.
const receiptBytes = 8 + 8 + handleBytes

const (
	receiptRead   = 1
	receiptFailed = 2
)

func (c *ipc) SendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) (err error) {
	c.group.enter()
	defer c.cleanup(&err)
	const name = "comm.SendRecv"
	caller, err := c.announce("SendRecv", s)
	if err != nil {
		return err
	}
	incoming := packet{c.all[:len(c.own.raw)], len(c.peers)}
	var in, out tensor.Tensor // packets; absent if there is no message
	var failed error          // on this rank, which takes part in both exchanges nevertheless
	if to >= 0 {
		c.own.write(header{op: opSendRecv, unit: size(send)}, c.readyIndex, nil, nil)
		if failed = c.writeLocation(send); failed != nil {
			c.own.fail()
		}
		out = bytesOf(c.own.raw)
	}
	if from >= 0 {
		in = bytesOf(incoming.raw)
	}
	if err := c.host.SendRecv(nil, in, from, out, to); err != nil {
		return c.group.hostFailed(err)
	}
	clear(c.receipts)
	receiptOut, receiptIn := c.receipts[:receiptBytes], c.receipts[receiptBytes:]
	if from >= 0 && !incoming.failed() && incoming.header().unit == size(recv) {
		if err := c.copyMessage(recv, from, incoming, receiptOut); err != nil {
			failed = cmp.Or(failed, err)
			receiptOut[0] = receiptFailed
		}
	}
	in, out = tensor.Tensor{}, tensor.Tensor{}
	if from >= 0 {
		out = bytesOf(receiptOut)
	}
	if to >= 0 {
		in = bytesOf(receiptIn)
	}
	if err := c.host.SendRecv(nil, in, to, out, from); err != nil {
		return c.group.hostFailed(err)
	}
	switch {
	case failed != nil:
		return failed
	case from >= 0 && incoming.failed():
		return status.Errorf(status.Comm, "%s: rank %d could not export its tensor; see its error", name, from)
	case from >= 0 && receiptOut[0] == 0:
		return status.Errorf(status.Comm,
			"%s: rank %d sends %d bytes to rank %d, which expects %v; both must give one size", name, from,
			incoming.header().unit, c.me, recv)
	case to >= 0 && receiptIn[0] == 0:
		return status.Errorf(status.Comm,
			"%s: rank %d sends %v to rank %d, which expects another size; both must give one size", name, c.me,
			send, to)
	case to >= 0 && receiptIn[0] == receiptFailed:
		return status.Errorf(status.Comm, "%s: rank %d could not read the tensor of rank %d; see its error", name,
			to, c.me)
	}
	if to >= 0 {
		if err := c.waitUntilRead(to, receiptIn); err != nil {
			return err
		}
	}
	if err := c.mark(); err != nil {
		return err
	}
	return c.leave(caller)
}

// size returns the bytes of a tensor, 0 for an absent one.
func size(t tensor.Tensor) int64 {
	if t.IsNil() {
		return 0
	}
	return t.Bytes()
}

// copyMessage enqueues the copy of a message from rank `from` and writes the receipt.
func (c *ipc) copyMessage(recv tensor.Tensor, from int, p packet, receipt []byte) error {
	peer := &c.peers[from]
	if from != c.me {
		if err := c.waitReady(from, p); err != nil {
			return err
		}
	}
	at, err := c.addressOf(from, p)
	if err != nil {
		return err
	}
	if err := c.copy(address(recv.Data), at, size(recv)); err != nil {
		return err
	}
	return c.recordRead(&c.pairs[from], !peer.sameProcess, receipt)
}

// recordRead records that this rank has read a message and writes the receipt.
func (c *ipc) recordRead(p *pairEvents, shared bool, receipt []byte) error {
	i := p.messages % len(c.ready)
	if p.messages++; i == len(p.read) {
		e, err := c.d.newEvent(shared)
		if err != nil {
			return err
		}
		p.read = append(p.read, e)
	}
	if err := c.record(p.read[i]); err != nil {
		return err
	}
	receipt[0], receipt[1] = receiptRead, byte(i)
	if p.messages > len(c.ready) {
		return nil // the sender has this event
	}
	shown, err := c.d.exportEvent(p.read[i], shared)
	binary.LittleEndian.PutUint64(receipt[8:], uint64(shown.Address))
	copy(receipt[16:], shown.Handle)
	return err
}

// waitUntilRead makes the communication stream wait until rank `to` has read the message.
func (c *ipc) waitUntilRead(to int, receipt []byte) error {
	p, i := &c.peers[to], int(receipt[1])
	if i >= len(p.read) {
		return status.Errorf(status.Comm, "rank %d names event %d of %d; start all ranks with the same program", to, i,
			len(p.read))
	}
	if p.read[i] == nil {
		e, err := c.d.importEvent(ipcEvent{uintptr(binary.LittleEndian.Uint64(receipt[8:])), receipt[16:]},
			p.sameProcess)
		if err != nil {
			return err
		}
		p.read[i] = e
	}
	return c.waitRemote(p.read[i])
}
