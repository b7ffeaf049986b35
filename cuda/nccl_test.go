package cuda

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// fakeNCCL replaces NCCL for goroutine ranks. It synchronizes on the host. The tests check the
// calls that the communicator makes.
type fakeNCCL struct {
	l      *commStream
	host   comm.Comm
	failed chan error
	ended  chan struct{}
	calls  []string // the functions that were called
}

func newFakeNCCL(d *Device, host comm.Comm, use streamUse) (transport, error) {
	return newFakeNCCLFor(d, host, use, false)
}

// newFakeNCCLFor makes a transport with sums in rank order if `ordered` is true on a rank.
func newFakeNCCLFor(d *Device, host comm.Comm, use streamUse, ordered bool) (transport, error) {
	// a separate communicator, as NCCL has its own connections
	sub, err := host.Split(0, host.Rank())
	if err != nil {
		return nil, err
	}
	l, err := newCommStream(d, d.ncclUse(use))
	return newNCCLOver(host, l, &fakeNCCL{l: l, host: sub, failed: make(chan error, 1), ended: make(chan struct{}, 9)},
		ordered, err)
}

func (f *fakeNCCL) id() ([]byte, error) { return []byte("the id"), nil }

func (f *fakeNCCL) start(ranks, rank int, id []byte) error {
	if ranks != f.host.Size() || rank != f.host.Rank() || string(id) != "the id" {
		return status.Errorf(status.Internal, "start: rank %d of %d, %q", rank, ranks, id)
	}
	return nil
}

func (f *fakeNCCL) abort() { f.ended <- struct{}{} }

func (f *fakeNCCL) close() error { return f.host.Close() }

func (f *fakeNCCL) err() error {
	select {
	case err := <-f.failed:
		return err
	default:
		return nil
	}
}

type fakeCall struct {
	Name string
	At   uintptr
	A, B []int64
}

// gatherCalls waits for the communication stream and gathers the calls of all ranks.
func (f *fakeNCCL) gatherCalls(own fakeCall) ([]fakeCall, error) {
	f.calls = append(f.calls, own.Name)
	if err := f.l.s.Sync(); err != nil {
		return nil, err
	}
	text, err := json.Marshal(own)
	if err != nil {
		return nil, err
	}
	texts, err := comm.GatherBytes(f.host, text)
	calls := make([]fakeCall, len(texts))
	for j := range texts {
		if err := json.Unmarshal(texts[j], &calls[j]); err != nil {
			return nil, err
		}
		if calls[j].Name != own.Name {
			return nil, status.Errorf(status.Internal, "rank %d: %s, here %s", j, calls[j].Name, own.Name)
		}
	}
	return calls, err
}

// finish waits until all ranks have made their copies.
func (f *fakeNCCL) finish() error {
	if err := f.l.s.Sync(); err != nil {
		return err
	}
	return f.host.Barrier()
}

func (f *fakeNCCL) allToAll(dst uintptr, recvAt, recv []int64, src uintptr, sendAt, send []int64) error {
	calls, err := f.gatherCalls(fakeCall{"all to all", src, sendAt, send})
	if err != nil {
		return err
	}
	for j, c := range calls {
		if c.B[f.host.Rank()] != recv[j] {
			return status.Errorf(status.Internal, "rank %[2]d sends %[1]d bytes, %[3]d are expected",
				c.B[f.host.Rank()], j, recv[j])
		}
		if err := f.l.copy(dst+uintptr(recvAt[j]), c.At+uintptr(c.A[f.host.Rank()]), recv[j]); err != nil {
			return err
		}
	}
	return f.finish()
}

func (f *fakeNCCL) allGather(dst, src uintptr, bytes int64) error {
	calls, err := f.gatherCalls(fakeCall{"all gather", src, []int64{bytes}, nil})
	if err != nil {
		return err
	}
	for j, c := range calls {
		if c.A[0] != bytes {
			return status.Errorf(status.Internal, "rank %d sends %d bytes, here %d", j, c.A[0], bytes)
		}
		if err := f.l.copy(dst+uintptr(int64(j)*bytes), c.At, bytes); err != nil {
			return err
		}
	}
	return f.finish()
}

func (f *fakeNCCL) allReduce(t tensor.Tensor) error {
	calls, err := f.gatherCalls(fakeCall{Name: "all reduce", At: address(t.Data)})
	if err != nil {
		return err
	}
	return f.sum(address(t.Data), calls, 0, t.Numel(), t.DType)
}

func (f *fakeNCCL) reduceScatter(dst, src uintptr, n int64, dtype tensor.DType) error {
	calls, err := f.gatherCalls(fakeCall{"reduce scatter", src, []int64{n}, nil})
	if err != nil {
		return err
	}
	for j, c := range calls {
		if c.A[0] != n {
			return status.Errorf(status.Internal, "rank %d sums %d elements, here %d", j, c.A[0], n)
		}
	}
	return f.sum(dst, calls, int64(f.host.Rank())*n*dtype.Size(), n, dtype)
}

// sum writes the sums of n elements, at this offset in the memory of all ranks, to dst.
func (f *fakeNCCL) sum(dst uintptr, calls []fakeCall, offset, n int64, dtype tensor.DType) error {
	if dtype == tensor.BF16 {
		return status.Errorf(status.Internal, "NCCL rounds sums in BF16 at every addition")
	}
	out, err := f.l.d.Alloc(n * dtype.Size())
	if err != nil {
		return err
	}
	defer out.Free()
	var blocks []uintptr
	for _, c := range calls {
		blocks = append(blocks, c.At+uintptr(offset))
	}
	if err := f.l.combine(address(out.Pointer()), blocks, n, dtype, comm.Sum); err != nil {
		return err
	}
	if err := f.finish(); err != nil {
		return err
	}
	return f.l.copy(dst, address(out.Pointer()), n*dtype.Size())
}

func (f *fakeNCCL) broadcast(t tensor.Tensor, root int) error {
	calls, err := f.gatherCalls(fakeCall{Name: fmt.Sprint("broadcast ", root), At: address(t.Data)})
	if err != nil {
		return err
	}
	if err := f.l.copy(address(t.Data), calls[root].At, t.Bytes()); err != nil {
		return err
	}
	return f.finish()
}

func (f *fakeNCCL) sendRecv(recv tensor.Tensor, from int, send tensor.Tensor, to int) error {
	calls, err := f.gatherCalls(fakeCall{"pair", address(send.Data), []int64{int64(to)}, []int64{size(send)}})
	if err != nil {
		return err
	}
	if from >= 0 {
		if calls[from].A[0] != int64(f.host.Rank()) || calls[from].B[0] != size(recv) {
			return status.Errorf(status.Internal, "rank %d sends otherwise", from)
		}
		if err := f.l.copy(address(recv.Data), calls[from].At, size(recv)); err != nil {
			return err
		}
	}
	return f.finish()
}

// TestNCCLCalls checks that every operation is bitwise equal to the staged transport, which passes
// the suite, also with sums of a few blocks at a time.
func TestNCCLCalls(t *testing.T) {
	for _, most := range []int{MaxRanks, 2} {
		for _, n := range []int{1, 2, 3, 4} {
			t.Run(fmt.Sprintf("%d/%d", most, n), func(t *testing.T) {
				defer func(m int) { maxCombined = m }(maxCombined)
				maxCombined = most
				onGPUs(t, n, func(d *Device, host comm.Comm) (*Comm, error) {
					return newComm(host, func(h comm.Comm, use streamUse) (transport, error) {
						return newFakeNCCL(d, h, use)
					}, forComm)
				}, func(r *gpuRank) error { return sameAsStaged(r, n) })
			})
		}
	}
}

func sameAsStaged(r *gpuRank, n int) error {
	sub, err := r.host.Split(0, r.host.Rank())
	if err != nil {
		return err
	}
	viaStaged, err := NewComm(r.d, sub, "staged")
	if err != nil {
		return err
	}
	defer viaStaged.Close()
	me := r.c.Rank()
	rows, same, recv, send := make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n)
	for j := range n {
		rows[j], same[j] = int64((j*2+1)%3*700), 500
		recv[j], send[j] = int64((j*3+me*5)%4*100), int64((me*3+j*5)%4*100)
	}
	all, equal, sent, received := comm.RowsBefore(rows, n), comm.RowsBefore(same, n), comm.RowsBefore(send, n),
		comm.RowsBefore(recv, n)
	types := []tensor.DType{tensor.F32, tensor.BF16, tensor.F64, tensor.I32, tensor.I64}
	for _, d := range types {
		if d == tensor.BF16 && n > maxCombined {
			continue // refused; see TestNCCLFails
		}
		for _, op := range []struct {
			name string
			// elements of the result and of the argument; the result starts as 7 or, without an
			// argument, as the argument
			out, in int64
			run     func(c *Comm, out, in tensor.Tensor) error
		}{
			{"all-to-all", received * 3, sent * 3, func(c *Comm, out, in tensor.Tensor) error {
				return c.AllToAll(r.s[0], out.View(received, 3), in.View(sent, 3), recv, send)
			}},
			{"gather", all * 3, rows[me] * 3, func(c *Comm, out, in tensor.Tensor) error {
				return c.AllGather(r.s[0], out.View(all, 3), in.View(rows[me], 3), rows)
			}},
			{"scatter", rows[me] * 3, all * 3, func(c *Comm, out, in tensor.Tensor) error {
				return c.ReduceScatter(r.s[0], out.View(rows[me], 3), in.View(all, 3), rows)
			}},
			{"scatter in place", all * 3, 0, func(c *Comm, out, _ tensor.Tensor) error {
				whole := out.View(all, 3)
				return c.ReduceScatter(r.s[0], whole.Slice(0, comm.RowsBefore(rows, me), comm.RowsBefore(rows, me+1)),
					whole, rows)
			}},
			{"gather in place", all * 3, 0, func(c *Comm, out, _ tensor.Tensor) error {
				whole := out.View(all, 3)
				return c.AllGather(r.s[0], whole,
					whole.Slice(0, comm.RowsBefore(rows, me), comm.RowsBefore(rows, me+1)), rows)
			}},
			{"even gather", equal * 3, same[me] * 3, func(c *Comm, out, in tensor.Tensor) error {
				return c.AllGather(r.s[0], out.View(equal, 3), in.View(same[me], 3), same)
			}},
			{"even gather in place", equal * 3, 0, func(c *Comm, out, _ tensor.Tensor) error {
				whole := out.View(equal, 3)
				return c.AllGather(r.s[0], whole,
					whole.Slice(0, comm.RowsBefore(same, me), comm.RowsBefore(same, me+1)), same)
			}},
			{"even scatter", same[me] * 3, equal * 3, func(c *Comm, out, in tensor.Tensor) error {
				return c.ReduceScatter(r.s[0], out.View(same[me], 3), in.View(equal, 3), same)
			}},
			{"even scatter in place", equal * 3, 0, func(c *Comm, out, _ tensor.Tensor) error {
				whole := out.View(equal, 3)
				return c.ReduceScatter(r.s[0], whole.Slice(0, comm.RowsBefore(same, me), comm.RowsBefore(same, me+1)),
					whole, same)
			}},
			{"sum", 5000, 0, func(c *Comm, out, _ tensor.Tensor) error { return c.AllReduce(r.s[0], out, comm.Sum) }},
			{"max", 5000, 0, func(c *Comm, out, _ tensor.Tensor) error { return c.AllReduce(r.s[0], out, comm.Max) }},
			{"min", 1, 0, func(c *Comm, out, _ tensor.Tensor) error { return c.AllReduce(r.s[0], out, comm.Min) }},
			{"broadcast", 999, 0, func(c *Comm, out, _ tensor.Tensor) error { return c.Broadcast(r.s[0], out, n-1) }},
			{"pair", 500, 500, func(c *Comm, out, in tensor.Tensor) error {
				return c.SendRecv(r.s[0], out, (me+n-1)%n, in, (me+1)%n)
			}},
		} {
			var bits [2][]byte
			for i, c := range []*Comm{r.c, viaStaged} {
				var err error
				if bits[i],
					err = r.result(d, op.out, op.in, func(out, in tensor.Tensor) error {
					return op.run(c, out, in)
				}); err != nil {
					return status.Errorf(status.Internal, "%s of %v with %s: %w", op.name, d, c.Kind(), err)
				}
			}
			if string(bits[0]) != string(bits[1]) {
				return status.Errorf(status.Internal, "%s of %v: the result differs from the staged transport",
					op.name, d)
			}
		}
	}
	return nil
}

// result runs an operation on values of this rank and returns the bits of its result. One value on
// one rank is NaN.
func (r *gpuRank) result(d tensor.DType, out, in int64, run func(out, in tensor.Tensor) error) ([]byte, error) {
	make_ := func(n int64) (tensor.Tensor, device.Buffer, error) {
		values := make([]float32, n)
		for k := range values {
			values[k] = float32((int64(r.c.Rank()+1)*(int64(k)+3)*7919)%20011-10000) / 3
			if k == 4 && r.c.Rank() == 0 && (d == tensor.F32 || d == tensor.F64 || d == tensor.BF16) {
				values[k] = float32(math.NaN())
			}
		}
		t := tensor.Of(nil, d, n)
		b, err := r.d.Alloc(t.Bytes())
		if err != nil {
			return t, nil, err
		}
		t.Data, t.Where = b.Pointer(), tensor.CUDA
		host := make([]byte, t.Bytes()+8)
		encoded := bytesOf(host).At(0, d, n)
		for k, v := range values {
			switch d {
			case tensor.F32:
				encoded.Float32s()[k] = v
			case tensor.F64:
				encoded.Float64s()[k] = float64(v)
			case tensor.I32:
				encoded.Int32s()[k] = int32(v)
			case tensor.I64:
				encoded.Int64s()[k] = int64(v)
			case tensor.BF16:
				bits := tensor.F32ToBF16(v)
				host[2*k], host[2*k+1] = byte(bits), byte(bits>>8)
			}
		}
		if n == 0 {
			return t, b, nil
		}
		return t, b, r.d.Copy(r.s[0], t, encoded)
	}
	o, ob, err := make_(out)
	if err != nil {
		return nil, err
	}
	defer ob.Free()
	i, ib, err := make_(in)
	if err != nil {
		return nil, err
	}
	defer ib.Free()
	if err := run(o, i); err != nil {
		return nil, err
	}
	bits := make([]byte, o.Bytes())
	if len(bits) > 0 {
		if err := r.d.Copy(r.s[0], bytesOf(bits).At(0, d, out), o); err != nil {
			return nil, err
		}
	}
	err = r.s[0].Sync()
	for k := int64(0); k < out; k++ { // all NaNs count as equal
		at := bits[k*d.Size() : (k+1)*d.Size()]
		one := bytesOf(at)
		nan := false
		switch d {
		case tensor.F32:
			nan = math.IsNaN(float64(one.At(0, d, 1).Float32s()[0]))
		case tensor.F64:
			nan = math.IsNaN(one.At(0, d, 1).Float64s()[0])
		case tensor.BF16:
			nan = math.IsNaN(float64(tensor.BF16ToF32(uint16(at[0]) | uint16(at[1])<<8)))
		}
		if nan {
			clear(at)
			at[0] = 0x5a
		}
	}
	return bits, err
}

// TestNCCLCollectives checks for which calls NCCL's own collectives are used. One rank decides that
// sums are in rank order.
func TestNCCLCollectives(t *testing.T) {
	even, uneven := []int64{4, 4, 4}, []int64{4, 5, 3}
	for _, w := range []struct {
		ordered bool
		op      string
		dtype   tensor.DType
		rows    []int64
		want    string
	}{
		{false, "gather", tensor.BF16, even, "all gather"},
		{true, "gather", tensor.F32, even, "all gather"},
		{false, "gather", tensor.F32, uneven, "all to all"},
		{false, "scatter", tensor.F32, even, "reduce scatter"},
		{false, "scatter", tensor.F32, uneven, "all to all"},
		{false, "scatter", tensor.BF16, even, "all to all"},
		{true, "scatter", tensor.F32, even, "all to all"},
		{true, "scatter", tensor.I64, even, "reduce scatter"},
		{false, "sum", tensor.F32, nil, "all reduce"},
		{false, "sum", tensor.BF16, nil, "all to all, all gather"},
		{true, "sum", tensor.F32, nil, "all to all, all gather"},
		{true, "sum", tensor.I32, nil, "all reduce"},
		{false, "max", tensor.F32, nil, "all to all, all gather"},
	} {
		t.Run(fmt.Sprintf("%v/%s/%v/%v", w.ordered, w.op, w.dtype, w.rows), func(t *testing.T) {
			onGPUs(t, 3, func(d *Device, host comm.Comm) (*Comm, error) {
				return newComm(host, func(h comm.Comm, use streamUse) (transport, error) {
					return newFakeNCCLFor(d, h, use, w.ordered && host.Rank() == 1)
				}, forComm)
			}, func(r *gpuRank) error {
				whole, err := r.tensor(w.dtype, 12, 2)
				if err != nil {
					return err
				}
				switch w.op {
				case "sum":
					err = r.c.AllReduce(r.s[0], whole, comm.Sum)
				case "max":
					err = r.c.AllReduce(r.s[0], whole, comm.Max)
				case "gather":
					err = r.c.AllGather(r.s[0], whole,
						whole.Slice(0, comm.RowsBefore(w.rows, r.c.Rank()), comm.RowsBefore(w.rows, r.c.Rank()+1)),
						w.rows)
				case "scatter":
					err = r.c.ReduceScatter(r.s[0],
						whole.Slice(0, comm.RowsBefore(w.rows, r.c.Rank()), comm.RowsBefore(w.rows, r.c.Rank()+1)),
						whole, w.rows)
				}
				if err != nil {
					return err
				}
				if got := strings.Join(r.c.transport.(*nccl).library.(*fakeNCCL).calls, ", "); got != w.want {
					return status.Errorf(status.Internal, "%s, want %s", got, w.want)
				}
				return nil
			})
		})
	}
}

// TestNCCLScratch checks that reductions allocate no GPU memory, whatever the size of their tensors
// and rows, and that sums in chunks are bitwise equal to the sums of the staged transport.
func TestNCCLScratch(t *testing.T) {
	defer func(n int64) { ncclScratch = n }(ncclScratch)
	ncclScratch = 4096
	onGPUs(t, 3, func(d *Device, host comm.Comm) (*Comm, error) {
		return newComm(host, func(h comm.Comm, use streamUse) (transport, error) { return newFakeNCCL(d, h, use) },
			forComm)
	}, func(r *gpuRank) error {
		if err := sameAsStaged(r, 3); err != nil {
			return err
		}
		wide, err := r.tensor(tensor.F32, 3, 5000) // a row exceeds the scratch
		if err != nil {
			return err
		}
		low, err := r.tensor(tensor.BF16, 30_000)
		if err != nil {
			return err
		}
		one, err := r.tensor(tensor.F32, 1, 5000)
		if err != nil {
			return err
		}
		if err := r.d.Fill(r.s[0], wide, 0.5); err != nil {
			return err
		}
		before := r.d.live
		if err := r.c.ReduceScatter(r.s[0], one, wide, []int64{1, 1, 1}); err != nil {
			return err
		}
		if err := r.c.AllReduce(r.s[0], low, comm.Sum); err != nil {
			return err
		}
		if r.d.live != before {
			return status.Errorf(status.Internal, "reductions made %d allocations", r.d.live-before)
		}
		got, err := r.values(r.s[0], one)
		if err != nil {
			return err
		}
		for i, x := range got {
			if x != 1.5 {
				return status.Errorf(status.Internal, "element %d of a long row is %v, want 1.5", i, x)
			}
		}
		return nil
	})
}

// TestIPCScratch checks that the scratch of ipc fills a block of CUDA's, which a handle shares
// whole.
func TestIPCScratch(t *testing.T) {
	onGPUs(t, 2, ofKind("ipc"), func(r *gpuRank) error {
		if n := r.c.transport.(*ipc).scratch.Bytes(); n%(2<<20) != 0 || n == 0 {
			return status.Errorf(status.Internal, "the scratch has %d bytes, want a multiple of 2 MiB", n)
		}
		return nil
	})
}

// TestNCCLFails checks that an asynchronous error ends the communicator at once and that the next
// call returns it. A sum that cannot be rounded once must be refused.
func TestNCCLFails(t *testing.T) {
	defer func(m int) { maxCombined = m }(maxCombined)
	maxCombined = 2
	var fakes [3]*fakeNCCL
	onGPUs(t, 3, func(d *Device, host comm.Comm) (*Comm, error) {
		return newComm(host, func(h comm.Comm, use streamUse) (transport, error) {
			c, err := newFakeNCCL(d, h, use)
			if err == nil {
				fakes[host.Rank()] = c.(*nccl).library.(*fakeNCCL)
			}
			return c, err
		}, forComm)
	}, func(r *gpuRank) error {
		low, err := r.tensor(tensor.BF16, 10)
		if err != nil {
			return err
		}
		if err := r.c.AllReduce(r.s[0], low, comm.Sum); status.Of(err) != status.Unsupported {
			return status.Errorf(status.Internal, "BF16 over 3 ranks, 2 at a time: %v", err)
		}
		f := fakes[r.c.Rank()]
		f.failed <- status.Errorf(status.Comm, "NCCL: a peer is gone")
		select {
		case <-f.ended:
		case <-time.After(100 * time.Second):
			return status.Errorf(status.Internal, "asynchronous errors were not queried")
		}
		if err := r.c.Broadcast(r.s[0], low, 0); status.Of(err) != status.Comm ||
			!strings.Contains(err.Error(), "a peer is gone") {
			return status.Errorf(status.Internal, "after the error: %v", err)
		}
		if err := r.c.Close(); status.Of(err) != status.Comm || !strings.Contains(err.Error(), "a peer is gone") {
			return status.Errorf(status.Internal, "Close after the error: %v", err)
		}
		return nil
	})
}

// TestMessageToItself: a message of a rank to itself whose sizes differ is refused.
func TestMessageToItself(t *testing.T) {
	kinds := map[string]func(*Device, comm.Comm) (*Comm, error){"ipc": ofKind("ipc"), "staged": ofKind("staged"),
		"nccl": func(d *Device, host comm.Comm) (*Comm, error) {
			return newComm(host, func(h comm.Comm, use streamUse) (transport, error) { return newFakeNCCL(d, h, use) },
				forComm)
		}}
	for kind, make := range kinds {
		onGPUs(t, 2, make, func(r *gpuRank) error {
			x, err := r.tensor(tensor.F32, 8)
			if err != nil {
				return err
			}
			me := r.c.Rank()
			if err := r.c.SendRecv(r.s[0], x.Slice(0, 0, 3), me, x.Slice(0, 3, 8), me); status.Of(err) !=
				status.InvalidArgument || !strings.Contains(err.Error(), "sends 20 bytes to itself but expects 12") {
				return status.Errorf(status.Internal, "%s: %v", kind, err)
			}
			return nil
		})
	}
}
