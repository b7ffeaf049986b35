package cuda

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// stagedPiece is the bytes that are in one pinned buffer at a time where an operation can be cut;
// two are in use, so that the GPU fills one while the host exchanges the other.
const stagedPiece = 16 << 20

// staged takes tensors through pinned memory of the host and the host's communicator. Sums are the
// host's: the same bits.
//
// An all-to-all is not cut, because its ranks would have to agree on a number of pieces: its
// buffers have the size of what is exchanged. Its start waits until what is sent has left the GPU,
// and hands it to the host's communicator at once: so the wire works while the caller enqueues what
// comes next, and exchanges start in the order of the calls, on all ranks, whatever the order of
// their Waits. An MPI that says that it takes memory of a GPU gets the tensors themselves.
type staged struct {
	*commStream
	host  comm.Comm
	aware comm.Direct // the host's communicator, if it takes memory of a GPU
	piece int64       // stagedPiece, but in tests
	pool  []*pinned
	parts []int64 // two vectors of size: rows received and sent, without the rank's own
	halves
}

// halves are the two buffers of operations in pieces.
type halves struct {
	buffer [2]*pinned
	down   [2]*event // its piece has left the GPU
}

// pinned is host memory at the GPU's full speed. The communication stream fills it again only
// behind what it still reads of it; the host writes only what lies behind such a filling.
type pinned struct {
	buffer device.Buffer
	mark   *event
	used   bool
}

func newStaged(d *Device, host comm.Comm) (transport, error) {
	c := &staged{host: host, piece: stagedPiece, parts: make([]int64, 2*host.Size())}
	if x, ok := host.(comm.Direct); ok && x.TakesDeviceMemory() {
		c.aware = x
	}
	var err error
	if c.commStream, err = newCommStream(d); err != nil {
		return nil, err
	}
	for i := range c.down {
		if c.down[i], err = d.newEvent(false); err != nil {
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
	for _, e := range c.down {
		if e != nil {
			e.Close()
		}
	}
	for _, p := range append(c.pool, c.buffer[:]...) {
		if p != nil {
			p.free()
		}
	}
	c.pool, c.halves = nil, halves{}
	return err
}

func (p *pinned) free() {
	p.buffer.Free()
	p.mark.Close()
}

func (p *pinned) tensor(at int64, dtype tensor.DType, shape ...int64) tensor.Tensor {
	return tensor.Of(p.buffer.Pointer(), tensor.U8, p.buffer.Bytes()).At(at, dtype, shape...)
}

func (p *pinned) at(offset int64) uintptr { return number(p.buffer.Pointer()) + uintptr(offset) }

func (c *staged) newPinned(bytes int64) (*pinned, error) {
	b, err := c.d.AllocHost(bytes)
	if err != nil {
		return nil, status.Errorf(status.Of(err), "staging of %d bytes: %w", bytes, err)
	}
	mark, err := c.d.newEvent(false)
	if err != nil {
		b.Free()
		return nil, err
	}
	return &pinned{buffer: b, mark: mark}, nil
}

// take finds a free buffer of the size, the smallest, or makes one: after the first step all that
// are needed are there.
func (c *staged) take(bytes int64) (*pinned, error) {
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
	if best < 0 && largest >= 0 { // a free one that is too small gives way
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

// reserve makes the pinned memory of n exchanges at a time, in which a rank sends and receives so
// many bytes in all.
func (c *staged) reserve(n int, bytes int64) error {
	if c.aware != nil {
		return nil
	}
	var held []*pinned
	for range n {
		p, err := c.take(bytes)
		if err != nil {
			return err
		}
		held = append(held, p)
	}
	for _, p := range held {
		p.used = false
	}
	return nil
}

// stagedExchange is what a request must still bring back from the host.
type stagedExchange struct {
	c    *staged
	host comm.Request
	p    *pinned
	// where what was received lies in the buffer; bytes before and after the rank's own rows
	in, gap, rest int64
	dst           uintptr // of the first, and own, the bytes between the two
	own           int64
}

func (c *staged) start(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	caller, err := c.enter("AllToAll", s)
	if err != nil {
		return nil, err
	}
	if c.aware != nil {
		return c.startAware(caller, dst, src, recvRows, sendRows)
	}
	me, n := c.host.Rank(), c.host.Size()
	width := max(comm.RowBytes(dst), comm.RowBytes(src))
	recv, send := c.parts[:n], c.parts[n:]
	copy(recv, recvRows)
	copy(send, sendRows)
	recv[me], send[me] = 0, 0
	sent, received := comm.RowsBefore(send, n), comm.RowsBefore(recv, n)
	p, err := c.take((sent + received) * width)
	if err != nil {
		return nil, err
	}
	// What others get lies in src before and after the rank's own rows; in the buffer it is one
	// piece.
	sendGap, own := comm.RowsBefore(sendRows, me)*width, sendRows[me]*width
	recvGap := comm.RowsBefore(recvRows, me) * width
	from, to := number(src.Data), number(dst.Data)
	if err := c.copy(p.at(0), from, sendGap); err != nil {
		return nil, err
	}
	if err := c.copy(p.at(sendGap), from+uintptr(sendGap+own), sent*width-sendGap); err != nil {
		return nil, err
	}
	if err := c.s.Record(p.mark); err != nil {
		return nil, err
	}
	if err := c.copy(to+uintptr(recvGap), from+uintptr(sendGap), own); err != nil {
		return nil, err
	}
	if err := p.mark.Sync(); err != nil {
		return nil, err
	}
	r, err := c.request(caller)
	if err != nil {
		return nil, err
	}
	under, err := c.host.AllToAllStart(nil, p.tensor(sent*width, tensor.U8, received, width), p.tensor(0, tensor.U8, sent, width), recv, send)
	if err != nil {
		return nil, err
	}
	r.finish = finishStaged
	r.staged = stagedExchange{c: c, host: under, p: p, in: sent * width, gap: recvGap, rest: received*width - recvGap, dst: to, own: own}
	return r, nil
}

// startAware waits until what is sent is there, copies the rank's own rows and leaves the rest to
// MPI.
func (c *staged) startAware(caller *stream, dst, src tensor.Tensor, recvRows, sendRows []int64) (comm.Request, error) {
	if err := c.s.Record(c.down[0]); err != nil {
		return nil, err
	}
	me, width := c.host.Rank(), max(comm.RowBytes(dst), comm.RowBytes(src))
	to, from := number(dst.Data)+uintptr(comm.RowsBefore(recvRows, me)*width), number(src.Data)+uintptr(comm.RowsBefore(sendRows, me)*width)
	if err := c.copy(to, from, sendRows[me]*width); err != nil {
		return nil, err
	}
	if err := c.down[0].Sync(); err != nil {
		return nil, err
	}
	r, err := c.request(caller)
	if err != nil {
		return nil, err
	}
	if r.staged.host, err = c.aware.AllToAllDirect(dst, src, recvRows, sendRows); err != nil {
		return nil, err
	}
	r.finish = finishAware
	return r, nil
}

func finishAware(r *request) error {
	under := r.staged.host
	r.staged = stagedExchange{}
	return under.Wait()
}

// finishStaged waits for the host's exchange and enqueues the way back to the GPU.
func finishStaged(r *request) error {
	x := r.staged
	r.staged = stagedExchange{}
	if err := x.host.Wait(); err != nil {
		return err
	}
	if err := x.c.copy(x.dst, x.p.at(x.in), x.gap); err != nil {
		return err
	}
	if err := x.c.copy(x.dst+uintptr(x.gap+x.own), x.p.at(x.in+x.gap), x.rest); err != nil {
		return err
	}
	x.p.used = false
	return x.c.s.Record(x.p.mark)
}

// Test lets the host's exchange proceed.
func (r *request) Test() (bool, error) {
	if !r.active || r.finish == nil {
		return true, nil
	}
	if t, ok := r.staged.host.(comm.Tester); ok {
		return t.Test()
	}
	return false, nil
}

// pieces runs an operation of n pieces that fit the two buffers: down fills one from the GPU, meet
// is the host's part, up brings the result back. Going down is one piece ahead.
func (c *staged) pieces(n int64, bytes int64, down, meet, up func(k int64, p *pinned) error) error {
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
		if err := down(k, c.buffer[k%2]); err != nil {
			return err
		}
		return c.s.Record(c.down[k%2])
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
		if err := c.down[k%2].Sync(); err != nil {
			return err
		}
		if err := meet(k, c.buffer[k%2]); err != nil {
			return err
		}
		if err := up(k, c.buffer[k%2]); err != nil {
			return err
		}
	}
	return nil
}

func ceil(a, b int64) int64 { return (a + b - 1) / b }
