package cuda

import "ulysses/internal/status"

// eventsInTurn is the number of events of each kind that a rank records in turn if ranks are in
// several processes. A host is at most eventsInTurn-2 rounds ahead of its GPU, which is some
// milliseconds of a training step.
const eventsInTurn = 8

// ipcEvents are the events that a rank records for other ranks.
//
// A rank records an event again only when no other rank waits for its last record on its GPU. CUDA
// does not document to which record a wait in another process belongs if the event is recorded
// between the call and the time at which the GPU comes to the wait. If it belonged to the newest
// record, ranks would wait for each other forever: "ready" of the next call lies behind a wait for
// the "done" of this call. Two events in turn would not be enough, because hosts may be several
// calls ahead of their GPUs.
//
// A round is what lies between two marks on the communication stream: the end of a call, or of its
// first half. When a stream has reached mark m, which lies behind waits for all ranks of round m,
// the GPUs of these ranks have passed their waits for the events of all rounds before m. Therefore
// a host that records in round m the events of round m-eventsInTurn first waits for mark
// m-eventsInTurn+1. All work before that mark has been enqueued by all ranks, so the wait ends.
//
// Waits for events of the same process belong to the record at the time of the call, as CUDA
// documents. If all ranks are in one process, there is one event of each kind, and no mark.
type ipcEvents struct {
	ready []*event // this rank's tensor is complete; by the number of the call
	done  []*event // this rank has read the tensors of the others; by the number of the round
	marks []*event
	// the numbers of calls, and of rounds of all ranks. Messages between two ranks count as calls
	// and marks of these ranks only, so packets contain the index of the event "ready".
	calls, rounds, marked int
	readyIndex            byte // of the current call
}

// newIPCEvents creates the events. shared: ranks are in several processes.
func (d *Device) newIPCEvents(shared bool) (e ipcEvents, err error) {
	n := 1
	if shared {
		n = eventsInTurn
	}
	for range n {
		var ready, done, mark *event
		if ready, err = d.newEvent(shared); err != nil {
			return e, err
		}
		e.ready = append(e.ready, ready)
		if done, err = d.newEvent(shared); err != nil {
			return e, err
		}
		e.done = append(e.done, done)
		if mark, err = d.newEvent(false); err != nil {
			return e, err
		}
		e.marks = append(e.marks, mark)
	}
	return e, nil
}

// record records an event for other ranks, after the host has waited until no rank waits for its
// last record. Such events are always recorded on the communication stream: CUDA does not document
// an interprocess event that is recorded on two streams in an order other than that of the calls.
func (c *ipc) record(e *event) error {
	if n := len(c.marks); n > 1 && c.marked >= n-1 {
		if err := c.marks[(c.marked+1)%n].Sync(); err != nil {
			return err
		}
	}
	return c.s.Record(e)
}

// recordReady records "ready" and writes its index to this rank's packet.
func (c *ipc) recordReady() error {
	i := c.calls % len(c.ready)
	c.calls++
	c.readyIndex = byte(i)
	return c.record(c.ready[i])
}

// mark ends a round.
func (c *ipc) mark() error {
	if len(c.marks) == 1 {
		return nil
	}
	e := c.marks[c.marked%len(c.marks)]
	c.marked++
	return c.s.Record(e)
}

// waitReady makes the communication stream wait for the tensor of rank j.
func (c *ipc) waitReady(j int, p packet) error {
	i, ready := int(p.readyIndex()), c.peers[j].ready
	if i >= len(ready) {
		return status.Errorf(status.Comm, "rank %d names event %d of %d; start all ranks with the same program", j, i,
			len(ready))
	}
	return c.waitRemote(ready[i])
}

func (e *ipcEvents) close() {
	for _, list := range [][]*event{e.ready, e.done, e.marks} {
		for _, x := range list {
			x.Close()
		}
	}
	*e = ipcEvents{}
}
