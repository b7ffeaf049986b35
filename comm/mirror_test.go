package comm_test

import (
	"unsafe"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// mirror lets a communicator for memory of a device be tested with tensors of the host: each call
// takes them to the device and back on a stream whose order is all that holds copies and call
// together. Every other call has no stream and vouches for the order itself.
type mirror struct {
	comm.Comm
	d      device.Device
	s      device.Stream
	memory device.Buffer // of calls under way
	used   int64
	flying int
	calls  int
	cut    int64
}

const mirrorBytes = 24 << 20

func newMirror(d device.Device, c comm.Comm, cut int64) (*mirror, error) {
	m := &mirror{Comm: c, d: d, cut: cut}
	if cut > 0 {
		c.(*cuda.Comm).Cut(cut)
	}
	var err error
	if m.s, err = d.NewStream(); err != nil {
		return nil, err
	}
	m.memory, err = d.Alloc(mirrorBytes)
	return m, err
}

func (m *mirror) close() {
	m.s.Close()
	m.memory.Free()
}

func (m *mirror) Host() comm.Comm { return m.Comm.(comm.Layered).Host() }

func (m *mirror) Split(color, key int) (comm.Comm, error) {
	part, err := m.Comm.Split(color, key)
	if err != nil || part == nil {
		return nil, err
	}
	return newMirror(m.d, part, m.cut)
}

func (m *mirror) Close() error {
	err := m.Comm.Close()
	m.close()
	return err
}

// image is host memory and its place on the device.
type image struct{ host, there tensor.Tensor }

func bytesAt(p unsafe.Pointer, n int64, where tensor.Place) tensor.Tensor {
	t := tensor.Of(p, tensor.U8, n)
	t.Where = where
	return t
}

// span is the bytes between a tensor's first and behind its last element.
func span(t tensor.Tensor) int64 {
	if t.IsNil() || t.Numel() == 0 || t.Data == nil {
		return 0
	}
	n := int64(1)
	for i := range int(t.NDim) {
		n += (t.Shape[i] - 1) * t.Stride[i]
	}
	return n * t.DType.Size()
}

// place finds room on the device at an address that is aligned to elements alone.
func (m *mirror) place(bytes int64) unsafe.Pointer {
	at := m.used
	if m.used += (bytes+7)/8*8 + 8; m.used > mirrorBytes {
		panic("the mirror is too small")
	}
	return unsafe.Add(m.memory.Pointer(), at)
}

// up brings two tensors to the device; what they share there is what they share here.
func (m *mirror) up(ts ...*tensor.Tensor) ([]image, error) {
	for _, t := range ts {
		if t.Where != tensor.Host {
			return nil, status.Errorf(status.Unsupported, "the suite has no memory of a device")
		}
	}
	var images []image
	add := func(p unsafe.Pointer, n int64) image {
		i := image{bytesAt(p, n, tensor.Host), bytesAt(m.place(n), n, tensor.CUDA)}
		images = append(images, i)
		return i
	}
	move := func(t *tensor.Tensor, i image) {
		t.Data = unsafe.Add(i.there.Data, uintptr(t.Data)-uintptr(i.host.Data))
	}
	a := ts[0]
	b := ts[len(ts)-1]
	lo, hi := uintptr(a.Data), uintptr(a.Data)+uintptr(span(*a))
	lb, hb := uintptr(b.Data), uintptr(b.Data)+uintptr(span(*b))
	if a != b && span(*a) > 0 && span(*b) > 0 && lo < hb && lb < hi {
		first := a.Data
		if lb < lo {
			first = b.Data
		}
		both := add(first, int64(max(hi, hb)-min(lo, lb)))
		move(a, both)
		move(b, both)
	} else {
		for _, t := range ts {
			if n := span(*t); n > 0 {
				move(t, add(t.Data, n))
			}
		}
	}
	for _, t := range ts {
		if !t.IsNil() {
			t.Where = tensor.CUDA
		}
	}
	for _, i := range images {
		if err := m.d.Copy(m.s, i.there, i.host); err != nil {
			return nil, err
		}
	}
	return images, nil
}

// down brings everything back and waits.
func (m *mirror) down(images []image) error {
	for _, i := range images {
		if err := m.d.Copy(m.s, i.host, i.there); err != nil {
			return err
		}
	}
	return m.s.Sync()
}

func (m *mirror) stream() (device.Stream, error) {
	if m.calls++; m.calls%2 == 0 {
		return m.s, nil
	}
	return nil, m.s.Sync()
}

func (m *mirror) around(f func(s device.Stream) error, ts ...*tensor.Tensor) error {
	images, err := m.up(ts...)
	if err != nil {
		return err
	}
	s, err := m.stream()
	if err != nil {
		return err
	}
	if len(images) == 0 && s == nil {
		s = m.s // absent tensors are the device's by their stream
	}
	if err := f(s); err != nil {
		return err
	}
	err = m.down(images)
	if m.flying == 0 {
		m.used = 0
	}
	return err
}

func (m *mirror) AllToAll(_ device.Stream, dst, src tensor.Tensor, recv, send []int64) error {
	return m.around(func(s device.Stream) error { return m.Comm.AllToAll(s, dst, src, recv, send) }, &dst, &src)
}

type mirrorRequest struct {
	m      *mirror
	r      comm.Request
	images []image
}

func (m *mirror) AllToAllStart(_ device.Stream, dst, src tensor.Tensor, recv, send []int64) (comm.Request, error) {
	images, err := m.up(&dst, &src)
	if err != nil {
		return nil, err
	}
	s, err := m.stream()
	if err != nil {
		return nil, err
	}
	if len(images) == 0 {
		s = m.s
	}
	r, err := m.Comm.AllToAllStart(s, dst, src, recv, send)
	m.flying++
	return &mirrorRequest{m, r, images}, err
}

func (r *mirrorRequest) Wait() error {
	if err := r.r.Wait(); err != nil {
		return err
	}
	if r.m.flying--; r.m.flying == 0 {
		r.m.used = 0
	}
	return r.m.down(r.images)
}

func (r *mirrorRequest) Test() (bool, error) {
	if t, ok := r.r.(comm.Tester); ok {
		return t.Test()
	}
	return false, nil
}

func (m *mirror) AllReduce(_ device.Stream, t tensor.Tensor, op comm.Op) error {
	return m.around(func(s device.Stream) error { return m.Comm.AllReduce(s, t, op) }, &t)
}

func (m *mirror) AllGather(_ device.Stream, dst, src tensor.Tensor, rows []int64) error {
	return m.around(func(s device.Stream) error { return m.Comm.AllGather(s, dst, src, rows) }, &dst, &src)
}

func (m *mirror) ReduceScatter(_ device.Stream, dst, src tensor.Tensor, rows []int64) error {
	return m.around(func(s device.Stream) error { return m.Comm.ReduceScatter(s, dst, src, rows) }, &dst, &src)
}

func (m *mirror) Broadcast(_ device.Stream, t tensor.Tensor, root int) error {
	return m.around(func(s device.Stream) error { return m.Comm.Broadcast(s, t, root) }, &t)
}

func (m *mirror) SendRecv(_ device.Stream, recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	return m.around(func(s device.Stream) error { return m.Comm.SendRecv(s, recv, from, send, to) }, &recv, &send)
}
