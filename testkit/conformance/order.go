package conformance

import (
	"bytes"
	"math"
	"slices"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/ref"
)

// testOrder is about time: what streams and events promise, and what a caller may do once a call
// has returned. A device that is done when it returns passes without effort.
func testOrder(s *suite) {
	s.t.Run("a stream runs in order", s.streamOrder)
	s.t.Run("events order two streams", s.eventOrder)
	s.t.Run("a wait is for the last mark before it", s.lastMark)
	s.t.Run("an event without a mark holds nobody up", s.noMark)
	s.t.Run("the host waits for a mark", s.hostWaits)
	s.t.Run("arguments are the caller's again", s.argumentsReturn)
}

// streams opens n more streams and events on the device of b.
func (b *bed) streams(t *testing.T, n int) (streams []device.Stream, events []device.Event) {
	for range n {
		s, err := b.dev.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		e, err := b.dev.NewEvent()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		t.Cleanup(e.Close)
		streams, events = append(streams, s), append(events, e)
	}
	return streams, events
}

// value is the one number that x holds, as stream s brings it.
func (b *bed) value(t *testing.T, s device.Stream, x tensor.Tensor) float64 {
	host := []float32{float32(math.NaN())}
	try(t, b.dev.Copy(s, tensor.OfFloat32(host, 1), x.Slice(0, 0, 1)), s.Sync())
	return float64(host[0])
}

func try(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

const (
	rounds = 12
	length = 70000 // of the tensor that the operations work on: long enough to be seen unfinished
)

// zeros and ones are the tensors that the operations work on.
func (b *bed) zeros() tensor.Tensor {
	return b.inout("x", tensor.F32, dense, make([]float64, length), length).Tensor
}

// twiceAndOne is x ← 2x + 1, in two operations on one stream or on two: done out of order it gives
// another number.
func (b *bed) twiceAndOne(t *testing.T, double, add device.Stream, x, one tensor.Tensor, between func()) {
	try(t, b.dev.Scale(double, x, 2))
	between()
	try(t, b.dev.Add(add, x, x, one))
}

func (b *bed) ones() tensor.Tensor {
	x := make([]float64, length)
	for i := range x {
		x[i] = 1
	}
	return b.in("one", tensor.F32, dense, x, length).Tensor
}

const afterRounds = 1<<rounds - 1

func (s *suite) streamOrder(t *testing.T) {
	b := newBed(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	for range rounds {
		b.twiceAndOne(t, b.stream, b.stream, x, one, func() {})
	}
	if got := b.value(t, b.stream, x); got != afterRounds {
		t.Errorf("x = %v, want %v", got, afterRounds)
	}
}

// eventOrder passes x back and forth between two streams, each operation after a mark of the other.
func (s *suite) eventOrder(t *testing.T) {
	b := newBed(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	streams, events := b.streams(t, 2)
	for range rounds {
		b.twiceAndOne(t, streams[0], streams[1], x, one, func() { try(t, streams[0].Record(events[0]), streams[1].Wait(events[0])) })
		try(t, streams[1].Record(events[1]), streams[0].Wait(events[1]))
	}
	// streams[1] is never waited for by the host
	if got := b.value(t, streams[0], x); got != afterRounds {
		t.Errorf("x = %v, want %v: the streams did not wait for each other", got, afterRounds)
	}
	try(t, streams[1].Sync())
}

// lastMark records an event again behind what waits for it: were the wait for that mark, nothing
// could go on.
func (s *suite) lastMark(t *testing.T) {
	b := newBed(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	streams, events := b.streams(t, 2)
	try(t, b.dev.Add(streams[0], x, x, one), streams[0].Record(events[0]), streams[1].Wait(events[0]))
	try(t, b.dev.Scale(streams[1], x, 3), streams[1].Record(events[1]))
	try(t, streams[0].Wait(events[1]), b.dev.Add(streams[0], x, x, one), streams[0].Record(events[0]))
	if got := b.value(t, streams[1], one); got != 1 {
		t.Errorf("one = %v", got)
	}
	if got := b.value(t, streams[0], x); got != 4 {
		t.Errorf("x = %v, want 4", got)
	}
}

func (s *suite) noMark(t *testing.T) {
	b := newBed(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	_, events := b.streams(t, 1)
	try(t, b.stream.Wait(events[0]), events[0].Sync(), b.dev.Add(b.stream, x, x, one))
	if got := b.value(t, b.stream, x); got != 1 {
		t.Errorf("x = %v, want 1", got)
	}
}

// hostWaits waits for a mark behind a copy to the host, not for the stream.
func (s *suite) hostWaits(t *testing.T) {
	b := newBed(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	_, events := b.streams(t, 1)
	host := make([]float32, length)
	for i := range 5 {
		try(t, b.dev.Add(b.stream, x, x, one), b.dev.Copy(b.stream, tensor.OfFloat32(host, length), x), b.stream.Record(events[0]), events[0].Sync())
		if got := float32(i + 1); host[0] != got || host[length-1] != got {
			t.Fatalf("the host has %v ... %v, want %v", host[0], host[length-1], got)
		}
	}
}

// argumentsReturn spoils structs and the slices in them as soon as each call has returned, before
// anything needs to have run.
func (s *suite) argumentsReturn(t *testing.T) {
	g := &ref.Attention{Hq: 4, Hkv: 2, D: 16, Dv: 16, CuQ: bounds(30, 0, 41), CuK: bounds(30, 5, 50), KVHead: []int64{0, 1, 1, 1}, Causal: true, Scale: 0.25}
	in := newAttentionInput(tensor.F32, g, seeded(31))
	wanted := s.bits(t, func(b *bed) ([]*array, error) { return b.attention(g, in, dense, dense) })
	spoiled := s.bits(t, func(b *bed) ([]*array, error) {
		c := *g
		c.CuQ, c.CuK, c.KVHead = slices.Clone(g.CuQ), slices.Clone(g.CuK), slices.Clone(g.KVHead)
		results, err := b.attention(&c, in, dense, dense)
		for _, x := range [][]int64{c.CuQ, c.CuK, c.KVHead} {
			for i := range x {
				x[i] = 1 << 40
			}
		}
		return results, err
	})
	for i := range wanted {
		if !bytes.Equal(wanted[i], spoiled[i]) {
			t.Errorf("%s: other bits when the documents are overwritten after the call", attentionResults[i])
		}
	}

	b := newBed(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	for i := range 5 {
		a := &device.SGD{W: x, G: one, LR: 1, GradScale: 10}
		try(t, b.dev.Fill(b.stream, x, float64(i)), b.dev.SGD(b.stream, a))
		*a = device.SGD{}
		if got, want := b.value(t, b.stream, x), float64(i-10); got != want {
			t.Errorf("x = %v, want %v: a struct was read after the call", got, want)
		}
	}
}
