package sp

import (
	"fmt"
	"math"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/mpitest"
)

// counted adds up the bytes that the all-to-alls of a communicator send to other ranks.
type counted struct {
	comm.Comm
	bytes int64
	calls int
}

func (c *counted) AllToAll(s device.Stream, dst, src tensor.Tensor, recvRows, sendRows []int64) error {
	c.count(src, sendRows)
	return c.Comm.AllToAll(s, dst, src, recvRows, sendRows)
}

func (c *counted) AllToAllStart(s device.Stream, dst, src tensor.Tensor, recvRows,
	sendRows []int64) (comm.Request, error) {
	c.count(src, sendRows)
	return c.Comm.AllToAllStart(s, dst, src, recvRows, sendRows)
}

func (c *counted) count(src tensor.Tensor, sendRows []int64) {
	c.bytes += bytesOfOthers(c, src, sendRows)
	c.calls++
}

// bytesOfOthers returns the bytes of the rows of t that an all-to-all sends to or receives from
// other ranks.
func bytesOfOthers(c comm.Comm, t tensor.Tensor, rows []int64) (bytes int64) {
	for j, n := range rows {
		if j != c.Rank() {
			bytes += n * comm.RowBytes(t)
		}
	}
	return bytes
}

// reshardOf returns a reshard of a query tensor and two key tensors, head-major and token-major,
// with gaps.
func reshardOf(b *bench, p *Plan, x *Batch) *Reshard {
	lo, hi, kvLo, kvHi := p.Heads()
	l, n := p.layer, x.Batch()
	r := &Reshard{
		Seq: []tensor.Tensor{b.gapped(n, x.Rows(), l.Heads, l.Dim), b.gapped(n, x.KVRows(), l.KVHeads, l.Dim),
			b.tensor(n, x.KVRows(), l.KVHeads, l.VDim)},
		Heads: []tensor.Tensor{b.tensor(hi-lo, n, x.Seq(), l.Dim).Permute(1, 2, 0, 3),
			b.gapped(n, x.KVSeq(), kvHi-kvLo, l.Dim), b.tensor(n, x.KVSeq(), kvHi-kvLo, l.VDim)},
		Shared: []bool{false, true, true},
	}
	bytes, err := p.ReshardWorkspace(x, r)
	must(err)
	r.Workspace = b.bytes(bytes)
	return r
}

// Every rank gets all rows of its heads, one all-to-all moves all tensors, and the inverse is
// bitwise exact.
func TestReshardThereAndBackIsTheIdentity(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		count := &counted{Comm: c}
		p, err := NewPlan(b.dev, count, lc.layer)
		must(err)
		x, err := NewBatch(c, lc.batch)
		must(err)
		r := reshardOf(b, p, x)
		lo, _, kvLo, _ := p.Heads()
		row0, head0 := []int64{x.Lo(), x.KVLo(), x.KVLo()}, []int64{lo, kvLo, kvLo}
		for i, t := range r.Seq {
			fill(t, uint64(i), row0[i], 0)
		}
		if err := p.SeqToHeads(b.stream, x, r); err != nil {
			return err
		}
		for i, t := range r.Heads {
			if err := expect("heads", t, func(n, row, h, d int64) float32 {
				return value(uint64(i), n, row, head0[i]+h, d)
			}); err != nil {
				return fmt.Errorf("tensor %d: %w", i, err)
			}
		}
		if count.calls > 1 {
			return fmt.Errorf("%d all-to-alls", count.calls)
		}
		for _, t := range r.Seq {
			each(t, func(_, _, _, _ int64, x *float32) { *x = -7 })
		}
		if err := p.HeadsToSeq(b.stream, x, r); err != nil {
			return err
		}
		for i, t := range r.Seq {
			if err := expect("seq", t, func(n, row, h, d int64) float32 {
				return value(uint64(i), n, row0[i]+row, h, d)
			}); err != nil {
				return fmt.Errorf("tensor %d: %w", i, err)
			}
		}
		return b.gapsIntact()
	})
}

func expect(name string, t tensor.Tensor, want func(b, i, h, d int64) float32) (err error) {
	each(t, func(b, i, h, d int64, x *float32) {
		if w := want(b, i, h, d); math.Float32bits(*x) != math.Float32bits(w) && err == nil {
			err = fmt.Errorf("%s[%d, %d, %d, %d] is %v, want %v", name, b, i, h, d, *x, w)
		}
	})
	return err
}

// <SeqToHeads x, y> = <x, HeadsToSeq y> if copies are summed. It is exact, because all values are
// small integers.
func TestReshardIsAdjoint(t *testing.T) {
	eachCase(t, func(b *bench, c comm.Comm, lc layerCase) error {
		p, err := NewPlan(b.dev, c, lc.layer)
		must(err)
		x, err := NewBatch(c, lc.batch)
		must(err)
		there, back := reshardOf(b, p, x), reshardOf(b, p, x)
		back.SumCopies = true
		integer := func(name uint64) func(b, i, h, d int64, x *float32) {
			return func(b, i, h, d int64, x *float32) { *x = float32(math.Round(float64(value(name, b, i, h, d)) * 8)) }
		}
		for i := range there.Seq {
			each(there.Seq[i], integer(uint64(100+i+10*c.Rank())))
			each(back.Heads[i], integer(uint64(5000+i+10*c.Rank())))
		}
		must(p.SeqToHeads(b.stream, x, there))
		must(p.HeadsToSeq(b.stream, x, back))
		sums := b.bytes(16).At(0, tensor.F64, 2)
		s := sums.Float64s()
		s[0], s[1] = 0, 0
		for i := range there.Seq {
			s[0] += dot(there.Heads[i], back.Heads[i])
			s[1] += dot(there.Seq[i], back.Seq[i])
		}
		must(c.AllReduce(b.stream, sums, comm.Sum))
		if s[0] != s[1] {
			return fmt.Errorf("<SeqToHeads x, y> is %v, <x, HeadsToSeq y> is %v", s[0], s[1])
		}
		return nil
	})
}

func dot(x, y tensor.Tensor) (sum float64) {
	each(x, func(b, i, h, d int64, v *float32) { sum += float64(*v) * float64(*at(y, b, i, h, d)) })
	return sum
}

// Types other than F32 are also resharded; bytes and errors depend on the type.
func TestReshardOtherTypesAndRefusals(t *testing.T) {
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, func(c comm.Comm) error {
			b := newBench()
			defer b.close()
			p, err := NewPlan(b.dev, c, Layer{Heads: 3, KVHeads: 3, Dim: 4, VDim: 4})
			must(err)
			x, err := NewBatch(c, BatchSpec{Batch: 1, Seq: 5})
			must(err)
			lo, hi, _, _ := p.Heads()
			ints := func(shape ...int64) tensor.Tensor {
				return b.bytes(tensor.Of(nil, tensor.I32, shape...).Bytes()).At(0, tensor.I32, shape...)
			}
			r := &Reshard{Seq: []tensor.Tensor{ints(1, x.Rows(), 3, 2)}, Heads: []tensor.Tensor{ints(1, 5, hi-lo, 2)}}
			for i := range r.Seq[0].Int32s() {
				r.Seq[0].Int32s()[i] = int32(x.Lo()*6) + int32(i)
			}
			bytes, err := p.ReshardWorkspace(x, r)
			must(err)
			r.Workspace = b.bytes(bytes)
			must(p.SeqToHeads(b.stream, x, r))
			for i := range int64(5) {
				for h := lo; h < hi; h++ {
					if got, want := r.Heads[0].Int32s()[(i*(hi-lo)+h-lo)*2], int32(i*6+h*2); got != want {
						return fmt.Errorf("row %d head %d is %d, want %d", i, h, got, want)
					}
				}
			}
			r.SumCopies = true
			refused(t, c, p.HeadsToSeq(b.stream, x, r), "F32")
			r.SumCopies = false
			r.Seq[0] = r.Seq[0].Slice(3, 0, 1)
			refused(t, c, p.HeadsToSeq(b.stream, x, r), "heads is")
			r.Seq[0] = tensor.Tensor{}
			refused(t, c, p.HeadsToSeq(b.stream, x, r), "one type")
			r.Heads = nil
			refused(t, c, p.HeadsToSeq(b.stream, x, r), "same number of each")
			if c.Size() > 1 {
				alone, err := newBatch(0, 1, BatchSpec{Batch: 1, Seq: 5})
				must(err)
				refused(t, c, p.HeadsToSeq(b.stream, alone, r), "one communicator")
			}
			return nil
		})
	}
}
