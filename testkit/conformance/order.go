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

// testOrder tests the order of streams and events, and that a caller may change arguments after a
// call has returned. A device whose operations are complete when the call returns passes trivially.
func testOrder(s *suite) {
	s.t.Run("a stream runs in order", s.streamOrder)
	s.t.Run("events order two streams", s.eventOrder)
	s.t.Run("a wait is for the last recording before it", s.lastMark)
	s.t.Run("an event that was never recorded does not block", s.noMark)
	s.t.Run("the host waits for a recording", s.hostWaits)
	s.t.Run("arguments are the caller's again", s.argumentsReturn)
}

// streams opens n more streams and events on the device of b.
func (b *bench) streams(t *testing.T, n int) (streams []device.Stream, events []device.Event) {
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

// value returns the first element of x, copied to the host on stream s.
func (b *bench) value(t *testing.T, s device.Stream, x tensor.Tensor) float64 {
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
	length = 70000 // elements of tensors: long enough that an unfinished operation is visible
)

// zeros returns the tensor on which operations run.
func (b *bench) zeros() tensor.Tensor {
	return b.inout("x", tensor.F32, dense, make([]float64, length), length).Tensor
}

// twiceAndOne computes x ← 2x + 1, in two operations on one stream or on two. In another order they
// give another number.
func (b *bench) twiceAndOne(t *testing.T, double, add device.Stream, x, one tensor.Tensor, between func()) {
	try(t, b.dev.Scale(double, x, 2))
	between()
	try(t, b.dev.Add(add, x, x, one))
}

// ones returns a tensor of ones.
func (b *bench) ones() tensor.Tensor {
	x := make([]float64, length)
	for i := range x {
		x[i] = 1
	}
	return b.in("one", tensor.F32, dense, x, length).Tensor
}

const afterRounds = 1<<rounds - 1

func (s *suite) streamOrder(t *testing.T) {
	b := newBench(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	for range rounds {
		b.twiceAndOne(t, b.stream, b.stream, x, one, func() {})
	}
	if got := b.value(t, b.stream, x); got != afterRounds {
		t.Errorf("x = %v, want %v", got, afterRounds)
	}
}

// eventOrder runs operations on x in turn on two streams, each after an event of the other.
func (s *suite) eventOrder(t *testing.T) {
	b := newBench(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	streams, events := b.streams(t, 2)
	for range rounds {
		b.twiceAndOne(t, streams[0], streams[1], x, one,
			func() { try(t, streams[0].Record(events[0]), streams[1].Wait(events[0])) })
		try(t, streams[1].Record(events[1]), streams[0].Wait(events[1]))
	}
	// the host has not waited for streams[1]
	if got := b.value(t, streams[0], x); got != afterRounds {
		t.Errorf("x = %v, want %v: the streams did not wait for each other", got, afterRounds)
	}
	try(t, streams[1].Sync())
}

// lastMark records an event again after the operation that waits for it. If Wait waited for the
// second recording, the streams would block each other.
func (s *suite) lastMark(t *testing.T) {
	b := newBench(t, s.one)
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
	b := newBench(t, s.one)
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
	b := newBench(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	_, events := b.streams(t, 1)
	host := make([]float32, length)
	for i := range 5 {
		try(t, b.dev.Add(b.stream, x, x, one), b.dev.Copy(b.stream, tensor.OfFloat32(host, length), x),
			b.stream.Record(events[0]), events[0].Sync())
		if got := float32(i + 1); host[0] != got || host[length-1] != got {
			t.Fatalf("the host has %v ... %v, want %v", host[0], host[length-1], got)
		}
	}
}

// argumentsReturn overwrites argument structs and their slices after each call, before the
// operation must have run.
func (s *suite) argumentsReturn(t *testing.T) {
	g := &ref.Attention{Hq: 4, Hkv: 2, D: 16, Dv: 16, CuQ: bounds(30, 0, 41), CuK: bounds(30, 5, 50),
		KVHead: []int64{0, 1, 1, 1}, Causal: true, Scale: 0.25}
	in := newAttentionInput(tensor.F32, g, seeded(31))
	wanted := s.bits(t, func(b *bench) ([]*array, error) { return b.attention(g, in, dense, dense) })
	spoiled := s.bits(t, func(b *bench) ([]*array, error) {
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
			t.Errorf("%s: the bits change if the documents are overwritten after the call", attentionResults[i])
		}
	}

	b := newBench(t, s.one)
	defer b.close()
	x, one := b.zeros(), b.ones()
	for i := range 5 {
		a := &device.SGD{W: x, G: one, LR: 1, GradScale: 10}
		try(t, b.dev.Fill(b.stream, x, float64(i)), b.dev.SGD(b.stream, a))
		*a = device.SGD{}
		if got, want := b.value(t, b.stream, x), float64(i-10); got != want {
			t.Errorf("x = %v, want %v: the device read the argument struct after the call", got, want)
		}
	}
}
