package cuda

// #include "bridge.h"
import "C"

import (
	"encoding/binary"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// A message between two ranks: the sender tells where it lies; the receiver copies it, and its
// receipt names the event that marks the copy, for which the sender's communication stream waits.
// That event belongs to the pair: it is recorded anew only when the sender has told of its next
// message, hence waited for the last.

// receipt is whether the message fitted, and the receiver's event: address, then handle.
const receiptBytes = 8 + 8 + handleBytes

func (c *ipc) sendRecv(s device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) (err error) {
	c.room.enter()
	defer c.over(&err)
	const name = "comm.SendRecv"
	caller, err := c.come("SendRecv", s)
	if err != nil {
		return err
	}
	incoming := packet{c.all[:len(c.mine.raw)], len(c.peers)}
	var in, out tensor.Tensor // packets; absent towards nobody
	if to >= 0 {
		c.mine.write(header{op: opSendRecv, unit: size(send)}, nil, nil)
		if err := c.locate(send); err != nil {
			return err
		}
		out = bytesOf(c.mine.raw)
	}
	if from >= 0 {
		in = bytesOf(incoming.raw)
	}
	if err := c.host.SendRecv(nil, in, from, out, to); err != nil {
		return c.room.lost(err)
	}
	clear(c.receipts)
	ours, theirs := c.receipts[:receiptBytes], c.receipts[receiptBytes:]
	if from >= 0 && incoming.header().unit == size(recv) {
		if err := c.pull(recv, from, incoming, ours); err != nil {
			return err
		}
	}
	in, out = tensor.Tensor{}, tensor.Tensor{}
	if from >= 0 {
		out = bytesOf(ours)
	}
	if to >= 0 {
		in = bytesOf(theirs)
	}
	if err := c.host.SendRecv(nil, in, to, out, from); err != nil {
		return c.room.lost(err)
	}
	if from >= 0 && ours[0] == 0 {
		return status.Errorf(status.Comm, "%s: rank %d sends %d bytes to rank %d, which expects %v", name, from, incoming.header().unit, c.me, recv)
	}
	if to >= 0 {
		if theirs[0] == 0 {
			return status.Errorf(status.Comm, "%s: rank %d expects another size than the %v of rank %d", name, to, send, c.me)
		}
		if err := c.awaitRead(to, theirs); err != nil {
			return err
		}
	}
	return c.leave(caller)
}

func size(t tensor.Tensor) int64 {
	if t.IsNil() {
		return 0
	}
	return t.Bytes()
}

// pull copies the message of a packet and writes the receipt.
func (c *ipc) pull(recv tensor.Tensor, from int, p packet, receipt []byte) error {
	peer := &c.peers[from]
	if from != c.me {
		if err := c.await(peer.ready); err != nil {
			return err
		}
	}
	at, err := c.reach(from, p)
	if err != nil {
		return err
	}
	if err := c.copy(number(recv.Data), at, size(recv)); err != nil {
		return err
	}
	if c.pairs[from] == nil {
		if c.pairs[from], err = c.d.newEvent(!peer.here); err != nil {
			return err
		}
	}
	mark := c.pairs[from]
	if err := c.s.Record(mark); err != nil {
		return err
	}
	shown, err := c.d.show(mark, !peer.here)
	if err != nil {
		return err
	}
	receipt[0] = 1
	binary.LittleEndian.PutUint64(receipt[8:], uint64(shown.Address))
	copy(receipt[16:], shown.Handle)
	return nil
}

// awaitRead makes the communication stream wait until rank `to` has read the message.
func (c *ipc) awaitRead(to int, receipt []byte) error {
	p := &c.peers[to]
	if p.read == nil {
		e, err := c.d.find(ipcEvent{uintptr(binary.LittleEndian.Uint64(receipt[8:])), receipt[16:]}, p.here)
		if err != nil {
			return err
		}
		p.read = e
	}
	return c.await(p.read)
}
