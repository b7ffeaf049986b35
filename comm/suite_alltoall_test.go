package comm

import (
	"errors"

	"ulysses/tensor"
)

// rowsBetween returns the rows that one rank sends to another: 0 for some pairs, more than 0 for
// some ranks to themselves.
func rowsBetween(from, to int) int64 { return int64((from*2 + to*5 + 2) % 4) }

func allToAllRows(c Comm, scale int64) (recv, send []int64) {
	for j := range c.Size() {
		send = append(send, rowsBetween(c.Rank(), j)*scale)
		recv = append(recv, rowsBetween(j, c.Rank())*scale)
	}
	return recv, send
}

// pattern returns byte k of the data that one rank sends to another.
func pattern(from, to int, k, salt int64) byte {
	return byte(int64(from)*31 + int64(to)*7 + k*3 + k>>8 + salt)
}

func fillSend(c Comm, t tensor.Tensor, send []int64, salt int64) {
	b, row, at := t.RawBytes(), rowBytes(t), int64(0)
	for j, n := range send {
		for k := range n * row {
			b[at+k] = pattern(c.Rank(), j, k, salt)
		}
		at += n * row
	}
}

func checkRecv(c Comm, t tensor.Tensor, recv []int64, salt int64) error {
	b, row, at := t.RawBytes(), rowBytes(t), int64(0)
	for j, n := range recv {
		for k := range n * row {
			if b[at+k] != pattern(j, c.Rank(), k, salt) {
				return wrong("byte %d from rank %d of %v: %d, want %d", k, j, t, b[at+k], pattern(j, c.Rank(), k, salt))
			}
		}
		at += n * row
	}
	for ; at < int64(len(b)); at++ {
		if b[at] != 0xEE {
			return wrong("byte %d behind the rows of %v was written", at, t)
		}
	}
	return nil
}

func suiteAllToAll(c Comm) error {
	for i, d := range allTypes {
		// small messages, and large ones for which libraries use another protocol
		for _, scale := range []int64{1, 3001} {
			recv, send := allToAllRows(c, scale)
			src, dst := newTensor(d, total(send), 2, 3), newTensor(d, total(recv)+2, 6)
			fillSend(c, src, send, int64(i))
			for k, b := 0, dst.RawBytes(); k < len(b); k++ {
				b[k] = 0xEE
			}
			if err := c.AllToAll(nil, dst, src, recv, send); err != nil {
				return err
			}
			if err := checkRecv(c, dst, recv, int64(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

func suiteAllToAllEmpty(c Comm) error {
	none := make([]int64, c.Size())
	if err := c.AllToAll(nil, tensor.Tensor{}, tensor.Tensor{}, none, none); err != nil {
		return err
	}
	if err := c.AllToAll(nil, newTensor(tensor.F32, 0, 4), newTensor(tensor.F32, 0, 4), none, none); err != nil {
		return err
	}
	ones := make([]int64, c.Size())
	for i := range ones {
		ones[i] = 1
	}
	wide := newTensor(tensor.F32, int64(c.Size()), 0) // rows without elements
	if err := c.AllToAll(nil, wide, wide, ones, ones); err != nil {
		return err
	}
	// Only rank 0 sends, and only the last rank receives.
	recv, send := make([]int64, c.Size()), make([]int64, c.Size())
	last := c.Size() - 1
	var src, dst tensor.Tensor
	if c.Rank() == 0 {
		send[last] = 2
		src = newTensor(tensor.I64, 2)
		fillSend(c, src, send, 9)
	}
	if c.Rank() == last {
		recv[0] = 2
		dst = newTensor(tensor.I64, 2)
	}
	if err := c.AllToAll(nil, dst, src, recv, send); err != nil {
		return err
	}
	if c.Rank() == last {
		return checkRecv(c, dst, recv, 9)
	}
	return nil
}

// suiteStart waits for two all-to-alls in an order that differs between ranks, with another
// collective between start and wait.
func suiteStart(c Comm) error {
	return errors.Join(startTwo(c, false), startTwo(c, true))
}

func startTwo(c Comm, test bool) error {
	recv, send := allToAllRows(c, 2000)
	var requests [2]Request
	var dst [2]tensor.Tensor
	for i := range requests {
		src := newTensor(tensor.F32, total(send), 5)
		dst[i] = newTensor(tensor.F32, total(recv), 5)
		fillSend(c, src, send, int64(i))
		var err error
		if requests[i], err = c.AllToAllStart(nil, dst[i], src, recv, send); err != nil {
			return err
		}
	}
	one := tensor.OfInt32([]int32{1}, 1)
	if t, ok := requests[1].(Tester); ok && test {
		if _, err := t.Test(); err != nil {
			return err
		}
	}
	steps := []func() error{requests[1].Wait, func() error { return c.AllReduce(nil, one, Sum) }, requests[0].Wait}
	if c.Rank()%2 == 1 {
		steps[0], steps[2] = steps[2], steps[0]
	}
	if c.Rank()%3 == 2 {
		steps[0], steps[1] = steps[1], steps[0]
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	if got := one.Int32s()[0]; got != int32(c.Size()) {
		return wrong("all-reduce of ones on %d ranks: %d", c.Size(), got)
	}
	for i := range dst {
		if err := checkRecv(c, dst[i], recv, int64(i)); err != nil {
			return err
		}
	}
	if requests[0].Wait() == nil {
		return wrong("a second Wait on a request succeeded")
	}
	return nil
}

func suiteSendRecv(c Comm) error {
	n, r := c.Size(), c.Rank()
	for _, count := range []int64{0, 1, 50000} {
		for _, shift := range []int{1, n - 1, n} { // forward, backward, to itself
			to, from := (r+shift)%n, (r-shift+n)%n
			send, recv := newTensor(tensor.F32, count), newTensor(tensor.F32, count)
			for k, x := int64(0), send.Float32s(); k < count; k++ {
				x[k] = float32(int64(r)*100000 + k)
			}
			if err := c.SendRecv(nil, recv, from, send, to); err != nil {
				return err
			}
			for k, got := range recv.Float32s() {
				if got != float32(from*100000+k) {
					return wrong("shift %d: element %d from rank %d is %v", shift, k, from, got)
				}
			}
		}
	}
	// Ranks in a line: the first receives no message, the last sends none.
	to, from := r+1, r-1
	if to == n {
		to = -1
	}
	send, recv := tensor.OfInt32([]int32{int32(r)}, 1), tensor.OfInt32([]int32{-7}, 1)
	if err := c.SendRecv(nil, recv, from, send, to); err != nil {
		return err
	}
	if want := int32(r - 1); r > 0 && recv.Int32s()[0] != want || r == 0 && recv.Int32s()[0] != -7 {
		return wrong("line: rank %d has %d", r, recv.Int32s()[0])
	}
	return nil
}
