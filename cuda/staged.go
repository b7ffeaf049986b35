package cuda

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// stagedChunk is the number of bytes in a pinned buffer when an operation runs in chunks. Two
// buffers are in use: the GPU fills one while the host communicates with the other.
const stagedChunk = 16 << 20

// staged moves tensors through pinned host memory and the host's communicator. The host's
// communicator computes the sums, so they are bitwise equal to sums of host tensors.
//
// An all-to-all is not split into chunks, because its ranks would have to agree on their number.
// Its buffers have the size of the data. AllToAllStart waits until the data to send has left the
// GPU and then starts the host's all-to-all. Therefore the network works while the caller enqueues
// its next operations, and all ranks start all-to-alls in the order of the calls, in whatever order
// they wait for them. If MPI accepts GPU memory, it gets the tensors themselves.
type staged struct {
	*commStream
	host   comm.Comm
	direct comm.Direct // the host's communicator, if it takes memory of a GPU
	chunk  int64       // stagedChunk, but in tests
	pool   []*pinned
	rows   []int64 // two vectors of size: rows to receive and to send, without this rank's own
	doubleBuffer
}

// doubleBuffer has the two buffers of operations in chunks.
type doubleBuffer struct {
	buffer [2]*pinned
	filled [2]*event // the copy of its chunk from the GPU is complete
}

// pinned is page-locked host memory, which the GPU copies at full speed. The communication stream
// fills it again only behind its own reads of it. The host writes only after such a fill is
// complete.
type pinned struct {
	buffer device.Buffer
	mark   *event
	used   bool
}

func newStaged(d *Device, host comm.Comm, use streamUse) (transport, error) {
	c := &staged{host: host, chunk: stagedChunk, rows: make([]int64, 2*host.Size())}
	if x, ok := host.(comm.Direct); ok && x.TakesDeviceMemory() {
		c.direct = x
	}
	var err error
	if c.commStream, err = newCommStream(d, use); err != nil {
		return nil, err
	}
	for i := range c.filled {
		if c.filled[i], err = d.newEvent(false); err != nil {
			c.close()
			return nil, err
		}
	}
	return c, nil
}

func (c *staged) kind() string { return "staged" }
func (c *staged) abort()       {}

func (c *staged) close() error {
	err := c.commStream.close()
	for _, e := range c.filled {
		if e != nil {
			e.Close()
		}
	}
	for _, p := range append(c.pool, c.buffer[:]...) {
		if p != nil {
			p.free()
		}
	}
	c.pool, c.doubleBuffer = nil, doubleBuffer{}
	return err
}

func (p *pinned) free() {
	p.buffer.Free()
	p.mark.Close()
}

func (p *pinned) tensor(at int64, dtype tensor.DType, shape ...int64) tensor.Tensor {
	return tensor.Of(p.buffer.Pointer(), tensor.U8, p.buffer.Bytes()).At(at, dtype, shape...)
}

func (p *pinned) at(offset int64) uintptr { return address(p.buffer.Pointer()) + uintptr(offset) }

func (c *staged) newPinned(bytes int64) (*pinned, error) {
	b, err := c.d.AllocHost(bytes)
	if err != nil {
		return nil, status.Errorf(status.Of(err), "cannot allocate %d bytes of pinned memory for communication: %w",
			bytes, err)
	}
	mark, err := c.d.newEvent(false)
	if err != nil {
		b.Free()
		return nil, err
	}
	return &pinned{buffer: b, mark: mark}, nil
}

// acquire returns the smallest free buffer of at least this size, and allocates one if there is
// none. After the first step, all buffers exist.
func (c *staged) acquire(bytes int64) (*pinned, error) {
	best, largest := -1, -1
	for i, p := range c.pool {
		if p.used {
			continue
		}
		if n := p.buffer.Bytes(); n >= bytes && (best < 0 || n < c.pool[best].buffer.Bytes()) {
			best = i
		}
		largest = i
	}
	if best < 0 && largest >= 0 { // replace a free buffer that is too small
		if err := c.pool[largest].mark.Sync(); err != nil {
			return nil, err
		}
		c.pool[largest].free()
		c.pool = append(c.pool[:largest], c.pool[largest+1:]...)
	}
	if best < 0 {
		p, err := c.newPinned(bytes)
		if err != nil {
			return nil, err
		}
		c.pool = append(c.pool, p)
		best = len(c.pool) - 1
	}
	p := c.pool[best]
	p.used = true
	return p, nil
}

// reserve allocates the pinned memory of n all-to-alls at a time. bytes is the sum of the bytes
// that a rank sends and receives in one of them.
func (c *staged) reserve(n int, bytes int64) error {
	if c.direct != nil {
		return nil
	}
	var taken []*pinned
	defer func() {
		for _, p := range taken {
			p.used = false
		}
	}()
	for range n {
		p, err := c.acquire(bytes)
		if err != nil {
			return err
		}
		taken = append(taken, p)
	}
	return nil
}

// stagedAllToAll is the state of an all-to-all whose received data must still be copied to the GPU.
type stagedAllToAll struct {
	c    *staged
	host comm.Request
	p    *pinned
	// Received rows start at in in the buffer. before and after are the bytes of received rows on
	// either side of this rank's own rows in dst; own is the bytes of those.
	in, before, own, after int64
	dst                    uintptr
}

func (c *staged) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (comm.Request, error) {
	caller, err := c.enter("AllToAll", s)
	if err != nil {
		return nil, err
	}
	if c.direct != nil {
		return c.startDirect(caller, dst, src, recvRows, sendRows)
	}
	me, n := c.host.Rank(), c.host.Size()
	width := max(comm.RowBytes(dst), comm.RowBytes(src))
	recv, send := c.rows[:n], c.rows[n:]
	copy(recv, recvRows)
	copy(send, sendRows)
	recv[me], send[me] = 0, 0
	sent, received := comm.RowsBefore(send, n), comm.RowsBefore(recv, n)
	p, err := c.acquire((sent + received) * width)
	if err != nil {
		return nil, err
	}
	// The rows for other ranks are before and after this rank's own rows in src, and contiguous in
	// the buffer.
	sendBefore, own := comm.RowsBefore(sendRows, me)*width, sendRows[me]*width
	recvBefore := comm.RowsBefore(recvRows, me) * width
	from, to := address(src.Data), address(dst.Data)
	if err := c.copy(p.at(0), from, sendBefore); err != nil {
		return nil, err
	}
	if err := c.copy(p.at(sendBefore), from+uintptr(sendBefore+own), sent*width-sendBefore); err != nil {
		return nil, err
	}
	if err := c.s.Record(p.mark); err != nil {
		return nil, err
	}
	if err := c.copy(to+uintptr(recvBefore), from+uintptr(sendBefore), own); err != nil {
		return nil, err
	}
	if err := p.mark.Sync(); err != nil {
		return nil, err
	}
	r, err := c.request(caller)
	if err != nil {
		return nil, err
	}
	hostRequest, err := c.host.AllToAllStart(nil, p.tensor(sent*width, tensor.U8, received, width),
		p.tensor(0, tensor.U8, sent, width), recv, send)
	if err != nil {
		return nil, err
	}
	r.finish = finishStaged
	r.staged = stagedAllToAll{c: c, host: hostRequest, p: p, in: sent * width, before: recvBefore, own: own,
		after: received*width - recvBefore, dst: to}
	return r, nil
}

// startDirect waits until src is complete, copies this rank's own rows and starts MPI's all-to-all
// on GPU memory.
func (c *staged) startDirect(caller *stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	if err := c.s.Record(c.filled[0]); err != nil {
		return nil, err
	}
	me, width := c.host.Rank(), max(comm.RowBytes(dst), comm.RowBytes(src))
	to, from := address(dst.Data)+uintptr(comm.RowsBefore(recvRows, me)*width),
		address(src.Data)+uintptr(comm.RowsBefore(sendRows, me)*width)
	if err := c.copy(to, from, sendRows[me]*width); err != nil {
		return nil, err
	}
	if err := c.filled[0].Sync(); err != nil {
		return nil, err
	}
	r, err := c.request(caller)
	if err != nil {
		return nil, err
	}
	if r.staged.host, err = c.direct.AllToAllDirect(dst, src, recvRows, sendRows); err != nil {
		return nil, err
	}
	r.finish = finishDirect
	return r, nil
}

func finishDirect(r *request) error {
	hostRequest := r.staged.host
	r.staged = stagedAllToAll{}
	return hostRequest.Wait()
}

// finishStaged waits for the host's all-to-all and enqueues the copies to the GPU.
func finishStaged(r *request) error {
	x := r.staged
	r.staged = stagedAllToAll{}
	if err := x.host.Wait(); err != nil {
		return err
	}
	if err := x.c.copy(x.dst, x.p.at(x.in), x.before); err != nil {
		return err
	}
	if err := x.c.copy(x.dst+uintptr(x.before+x.own), x.p.at(x.in+x.before), x.after); err != nil {
		return err
	}
	x.p.used = false
	return x.c.s.Record(x.p.mark)
}

// Test makes progress and reports whether Wait would return without waiting for the host.
func (r *request) Test() (bool, error) {
	if !r.active || r.finish == nil {
		return true, nil
	}
	if t, ok := r.staged.host.(comm.Tester); ok {
		return t.Test()
	}
	return false, nil
}

// pipeline runs an operation in n chunks of at most the given bytes. For chunk k, toHost enqueues
// the copy from the GPU to a buffer, onHost runs the host's collective, and toDevice enqueues the
// copy of the result. The copy of chunk k+1 to the host runs during onHost of chunk k.
func (c *staged) pipeline(n int64, bytes int64, toHost, onHost, toDevice func(k int64, p *pinned) error) error {
	if n == 0 {
		return nil
	}
	for i := range min(n, 2) {
		if p := c.buffer[i]; p == nil || p.buffer.Bytes() < bytes {
			made, err := c.newPinned(bytes)
			if err != nil {
				return err
			}
			if p != nil {
				if err := c.s.Sync(); err != nil {
					return err
				}
				p.free()
			}
			c.buffer[i] = made
		}
	}
	fetch := func(k int64) error {
		if err := toHost(k, c.buffer[k%2]); err != nil {
			return err
		}
		return c.s.Record(c.filled[k%2])
	}
	if err := fetch(0); err != nil {
		return err
	}
	for k := range n {
		if k+1 < n {
			if err := fetch(k + 1); err != nil {
				return err
			}
		}
		if err := c.filled[k%2].Sync(); err != nil {
			return err
		}
		if err := onHost(k, c.buffer[k%2]); err != nil {
			return err
		}
		if err := toDevice(k, c.buffer[k%2]); err != nil {
			return err
		}
	}
	return nil
}

func ceil(a, b int64) int64 { return (a + b - 1) / b }
