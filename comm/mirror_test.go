package comm_test

import (
	"unsafe"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// mirror lets a communicator for device memory pass a suite with host tensors. Each call copies its
// tensors to the device and back. Only the order of the stream connects the copies and the call.
// Every second call passes a nil stream and synchronizes the stream before it.
type mirror struct {
	comm.Comm
	d          device.Device
	s          device.Stream
	memory     device.Buffer // of calls in progress
	used       int64
	inProgress int // requests
	calls      int
	chunk      int64
}

const mirrorBytes = 24 << 20

func newMirror(d device.Device, c comm.Comm, chunk int64) (*mirror, error) {
	m := &mirror{Comm: c, d: d, chunk: chunk}
	if chunk > 0 {
		c.(*cuda.Comm).SetChunk(chunk)
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
	sub, err := m.Comm.Split(color, key)
	if err != nil || sub == nil {
		return nil, err
	}
	return newMirror(m.d, sub, m.chunk)
}

func (m *mirror) Close() error {
	err := m.Comm.Close()
	m.close()
	return err
}

// image is a range of host memory and its copy on the device.
type image struct{ host, device tensor.Tensor }

func bytesAt(p unsafe.Pointer, n int64, where tensor.Place) tensor.Tensor {
	t := tensor.Of(p, tensor.U8, n)
	t.Where = where
	return t
}

// span returns the bytes from a tensor's first element to the end of its last element.
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

// alloc returns device memory that is aligned to 8 bytes and no more.
func (m *mirror) alloc(bytes int64) unsafe.Pointer {
	at := m.used
	if m.used += (bytes+7)/8*8 + 8; m.used > mirrorBytes {
		panic("mirrorBytes is too small")
	}
	return unsafe.Add(m.memory.Pointer(), at)
}

// up copies one or two tensors to the device. Tensors that overlap on the host overlap there.
func (m *mirror) up(ts ...*tensor.Tensor) ([]image, error) {
	for _, t := range ts {
		if t.Where != tensor.Host {
			return nil, status.Errorf(status.Unsupported, "the suite has no device memory")
		}
	}
	var images []image
	add := func(p unsafe.Pointer, n int64) image {
		i := image{bytesAt(p, n, tensor.Host), bytesAt(m.alloc(n), n, tensor.CUDA)}
		images = append(images, i)
		return i
	}
	move := func(t *tensor.Tensor, i image) {
		t.Data = unsafe.Add(i.device.Data, uintptr(t.Data)-uintptr(i.host.Data))
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
		if err := m.d.Copy(m.s, i.device, i.host); err != nil {
			return nil, err
		}
	}
	return images, nil
}

// down copies the images back to the host and waits.
func (m *mirror) down(images []image) error {
	for _, i := range images {
		if err := m.d.Copy(m.s, i.host, i.device); err != nil {
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
		s = m.s // with absent tensors, a stream makes this a call for device memory
	}
	if err := f(s); err != nil {
		return err
	}
	err = m.down(images)
	if m.inProgress == 0 {
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
	m.inProgress++
	return &mirrorRequest{m, r, images}, err
}

func (r *mirrorRequest) Wait() error {
	if err := r.r.Wait(); err != nil {
		return err
	}
	if r.m.inProgress--; r.m.inProgress == 0 {
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
