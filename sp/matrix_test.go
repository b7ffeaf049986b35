//go:build !mpi

package sp

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/mpitest"
	"ulysses/testkit/ref"
)

// The matrix: every mask on every mesh, with and without documents, with several shapes, against
// float64.

// matrixMask is a set of options. Calls get tensors for those that need them.
type matrixMask struct {
	name    string
	layer   Layer
	perHead bool // the block mask has a matrix for each head
}

// matrixMasks returns no option, each case of each option, alone and with a causal mask, each pair
// of options, and all options. Every other block mask has a matrix for each head.
func matrixMasks() (masks []matrixMask) {
	add := func(name string, set ...func(l *Layer)) {
		m := matrixMask{name: name, perHead: len(masks)%2 == 0}
		for _, f := range set {
			f(&m.layer)
		}
		masks = append(masks, m)
	}
	var all []func(l *Layer)
	causal := optionCases[Options[0].Name][0]
	add("no option")
	for i, o := range Options {
		cases := optionCases[o.Name]
		for j, f := range cases {
			add(fmt.Sprintf("%s %d", o.Name, j+1), f)
			if i > 0 {
				add(fmt.Sprintf("%s %d, causal", o.Name, j+1), f, causal)
			}
		}
		for _, other := range Options[i+1:] {
			if i > 0 && len(cases) > 0 && len(optionCases[other.Name]) > 0 {
				add(o.Name+" and "+other.Name, cases[0], optionCases[other.Name][0], causal)
			}
		}
		if len(cases) > 0 {
			all = append(all, cases[len(cases)-1])
		}
	}
	add("all options but a right window",
		append(all, func(l *Layer) { l.Window = &device.Window{Left: 30, Right: -1} })...)
	return masks
}

// matrixShape is a shape of heads and lengths.
type matrixShape struct {
	heads, kvHeads, dim, vDim, batch, seq, kvSeq int64
	cu, cuK                                      []int64
}

var matrixShapes = []matrixShape{
	{heads: 4, kvHeads: 4, dim: 8, vDim: 8, batch: 1, seq: 64},
	{heads: 6, kvHeads: 2, dim: 8, vDim: 12, batch: 1, seq: 67},
	{heads: 8, kvHeads: 1, dim: 4, vDim: 4, batch: 2, seq: 33},
	{heads: 3, kvHeads: 3, dim: 5, vDim: 3, batch: 1, seq: 97},
	{heads: 2, kvHeads: 1, dim: 16, vDim: 16, batch: 1, seq: 5},
	{heads: 4, kvHeads: 2, dim: 8, vDim: 8, batch: 2, seq: 31, kvSeq: 47},
}

var packedShapes = []matrixShape{
	{heads: 4, kvHeads: 2, dim: 8, vDim: 8, batch: 1, seq: 90, cu: []int64{0, 1, 30, 31, 33, 80, 90}},
	{heads: 6, kvHeads: 3, dim: 7, vDim: 8, batch: 3, seq: 20, cu: []int64{0, 20, 25, 40, 41, 59, 60}},
	{heads: 5, kvHeads: 5, dim: 8, vDim: 8, batch: 2, seq: 20, kvSeq: 10, cu: []int64{0, 3, 20, 40},
		cuK: []int64{0, 9, 10, 20}},
	{heads: 8, kvHeads: 2, dim: 16, vDim: 4, batch: 1, seq: 101, cu: []int64{0, 50, 101}},
}

// matrixCase is one layer and batch.
type matrixCase struct {
	mask  matrixMask
	shape matrixShape
}

func (c *matrixCase) String() string {
	s := c.shape
	return fmt.Sprintf("%s, heads %d/%d of %d and %d, %d x %d tokens, keys %d, documents %v", c.mask.name, s.heads,
		s.kvHeads, s.dim, s.vDim, s.batch, s.seq, s.kvSeq, s.cu)
}

func (c *matrixCase) layer(ring int64, gather bool) Layer {
	l, s := c.mask.layer, c.shape
	l.Heads, l.KVHeads, l.Dim, l.VDim, l.Ring, l.Gather = s.heads, s.kvHeads, s.dim, s.vDim, ring, gather
	return l
}

const seed = 77

// sinkOf, slopeOf and keptBlock are the options' tensors.
func sinkOf(h int64) float32  { return 2 * value(8, h) }
func slopeOf(h int64) float32 { return 0.05 * (1.5 + value(9, h)) }
func keptBlock(h, row, column int64) uint8 {
	if value(10, h, row, column) < 0.2 {
		return 0
	}
	return 1
}

// matrixResult has the results of a run in global order: out, lse, dq, dk, dv, dsinks, dslopes.
type matrixResult [7][]float32

var matrixNames = [7]string{"out", "lse", "dq", "dk", "dv", "dsinks", "dslopes"}

func (c *matrixCase) sizes() [7]int64 {
	s, kv := c.shape, max(c.shape.kvSeq, 0)
	if kv == 0 {
		kv = s.seq
	}
	return [7]int64{s.batch * s.seq * s.heads * s.vDim, s.batch * s.seq * s.heads, s.batch * s.seq * s.heads * s.dim,
		s.batch * kv * s.kvHeads * s.dim, s.batch * kv * s.kvHeads * s.vDim, s.heads, s.heads}
}

// rowsOf calls f with each row of t [B, rows, H, D] and its number in the sequence.
func rowsOf(t tensor.Tensor, ranges []Range, f func(b, local, global int64)) {
	for b := range t.Shape[0] {
		local := int64(0)
		for _, r := range ranges {
			for i := r.Lo; i < r.Hi; i++ {
				f(b, local, i)
				local++
			}
		}
	}
}

// run computes the case on the ranks of c and adds this rank's results to out. The bytes that the
// rank sends must be those that the plan predicts.
func (c *matrixCase) run(b *bench, cm comm.Comm, m matrixMesh, out *matrixResult) error {
	count := &counted{Comm: cm}
	p, err := NewPlan(b.dev, count, c.layer(m.ring, m.gather))
	if err != nil {
		return err
	}
	s := c.shape
	spec := BatchSpec{Batch: s.batch, Seq: s.seq, KVSeq: s.kvSeq, CuSeqlens: s.cu, CuSeqlensKV: s.cuK, Ring: m.ring,
		Zigzag: m.zigzag}
	if m.uneven {
		spec.Rows = unevenRows(s.seq, m.ranks)
		if s.kvSeq > 0 {
			spec.KVRows = unevenRows(s.kvSeq, m.ranks)
		}
	}
	x, err := NewBatch(count, spec)
	if err != nil {
		return err
	}
	n, rows, kvRows, size := s.batch, x.Rows(), x.KVRows(), p.Sizes(x)
	a := Args{Q: b.tensor(n, rows, s.heads, s.dim), K: b.tensor(n, kvRows, s.kvHeads, s.dim),
		V: b.tensor(n, kvRows, s.kvHeads, s.vDim), Out: b.tensor(n, rows, s.heads, s.vDim),
		LSE: b.tensor(n, rows, s.heads), Saved: b.bytes(size.Saved), Workspace: b.bytes(size.Workspace), Seed: seed}
	g := Grads{DOut: b.tensor(n, rows, s.heads, s.vDim), DQ: b.tensor(n, rows, s.heads, s.dim),
		DK: b.tensor(n, kvRows, s.kvHeads, s.dim), DV: b.tensor(n, kvRows, s.kvHeads, s.vDim)}
	mine, kvMine := x.Ranges(cm.Rank()), x.KVRanges(cm.Rank())
	for _, t := range []struct {
		name   uint64
		x      tensor.Tensor
		ranges []Range
	}{{nameQ, a.Q, mine}, {nameK, a.K, kvMine}, {nameV, a.V, kvMine}, {nameDOut, g.DOut, mine}} {
		rowsOf(t.x, t.ranges, func(n, local, global int64) {
			for h := range t.x.Shape[2] {
				for d := range t.x.Shape[3] {
					*at(t.x, n, local, h, d) = value(t.name, n, global, h, d)
				}
			}
		})
	}
	l := p.Layer()
	if l.Sinks {
		a.Sinks, g.DSinks = b.tensor(s.heads), b.tensor(s.heads)
		for h := range s.heads {
			*at(a.Sinks, h) = sinkOf(h)
		}
	}
	if l.ALiBi {
		a.Slopes, g.DSlopes = b.tensor(s.heads), b.tensor(s.heads)
		for h := range s.heads {
			*at(a.Slopes, h) = slopeOf(h)
		}
	}
	if l.BlockRows > 0 {
		mask, shape := c.blocks(x)
		a.BlockMask = b.bytes(int64(len(mask))).View(shape[:]...)
		copy(a.BlockMask.RawBytes(), mask)
	}
	da, dg := a, g
	tensors := []struct{ host, moved *tensor.Tensor }{{&a.Out, &da.Out}, {&a.LSE, &da.LSE}, {&g.DQ, &dg.DQ},
		{&g.DK, &dg.DK}, {&g.DV, &dg.DV},
		{&g.DSinks, &dg.DSinks}, {&g.DSlopes, &dg.DSlopes}, {&a.Q, &da.Q}, {&a.K, &da.K}, {&a.V, &da.V},
		{&g.DOut, &dg.DOut}, {&a.Sinks, &da.Sinks},
		{&a.Slopes, &da.Slopes}, {&a.BlockMask, &da.BlockMask}, {&a.Saved, &da.Saved}, {&a.Workspace, &da.Workspace}}
	for _, t := range tensors {
		*t.moved = b.moved(*t.host)
	}
	if err := c.passes(b, p, x, count, &da, &dg); err != nil {
		return err
	}
	for _, t := range tensors {
		b.fetch(*t.host, *t.moved)
	}
	for i, t := range []struct {
		x      tensor.Tensor
		ranges []Range
		seq    int64
	}{{a.Out, mine, x.Seq()}, {addUnitAxis(a.LSE), mine, x.Seq()}, {g.DQ, mine, x.Seq()}, {g.DK, kvMine, x.KVSeq()},
		{g.DV, kvMine, x.KVSeq()}} {
		rowsOf(t.x, t.ranges, func(n, local, global int64) {
			for h := range t.x.Shape[2] {
				for d := range t.x.Shape[3] {
					out[i][((n*t.seq+global)*t.x.Shape[2]+h)*t.x.Shape[3]+d] = *at(t.x, n, local, h, d)
				}
			}
		})
	}
	for i, t := range []tensor.Tensor{g.DSinks, g.DSlopes} {
		for h := range t.Shape[0] {
			out[5+i][int64(cm.Rank())*s.heads+h] = *at(t, h)
		}
	}
	return nil
}

// passes runs both passes. The bytes that they send must be those that the plan predicts.
func (c *matrixCase) passes(b *bench, p *Plan, x *Batch, count *counted, a *Args, g *Grads) error {
	forward, backward := p.BytesSent(x)
	count.bytes = 0
	if err := p.Forward(b.stream, x, a); err != nil {
		return err
	}
	if want := forward + p.LSEBytesSent(x); count.bytes != want {
		return fmt.Errorf("forward sent %d bytes, planned %d", count.bytes, want)
	}
	count.bytes = 0
	if err := p.Backward(b.stream, x, a, g); err != nil {
		return err
	}
	if count.bytes != backward {
		return fmt.Errorf("backward sent %d bytes, planned %d", count.bytes, backward)
	}
	return b.stream.Sync()
}

// blocks returns the block mask of the case and its shape.
func (c *matrixCase) blocks(x *Batch) (mask []uint8, shape [3]int64) {
	l := c.mask.layer
	shape = [3]int64{1, ceil(x.Seq(), l.BlockRows), ceil(x.KVSeq(), l.BlockColumns)}
	if c.mask.perHead {
		shape[0] = c.shape.heads
	}
	for h := range shape[0] {
		for i := range shape[1] {
			for j := range shape[2] {
				mask = append(mask, keptBlock(h, i, j))
			}
		}
	}
	return mask, shape
}

// on runs the case on P ranks and returns the results, with gradients of sinks and slopes summed
// over ranks.
func (c *matrixCase) on(benches []*bench, m matrixMesh) (r matrixResult, err error) {
	r = c.empty(m.ranks)
	err = comm.RunLocal(m.ranks, func(cm comm.Comm) error { return c.run(benches[cm.Rank()], cm, m, &r) })
	c.sum(&r, m.ranks)
	return r, err
}

// empty returns memory for the results. Each rank has its own gradients of sinks and slopes.
func (c *matrixCase) empty(ranks int) (r matrixResult) {
	for i, n := range c.sizes() {
		if i >= 5 {
			n *= int64(ranks)
		}
		r[i] = make([]float32, n)
	}
	return r
}

// sum adds the gradients of sinks and slopes over ranks.
func (c *matrixCase) sum(r *matrixResult, ranks int) {
	for i := 5; i < 7; i++ {
		n := c.shape.heads
		for rank := 1; rank < ranks; rank++ {
			for h := range n {
				r[i][h] += r[i][int64(rank)*n+h]
			}
		}
		r[i] = r[i][:n]
	}
}

// exact returns the results in float64.
func (c *matrixCase) exact() (r [7][]float64, err error) {
	l, s := c.layer(1, false), c.shape
	x, err := newBatch(0, 1, BatchSpec{Batch: s.batch, Seq: s.seq, KVSeq: s.kvSeq, CuSeqlens: s.cu, CuSeqlensKV: s.cuK})
	if err != nil {
		return r, err
	}
	cuQ, cuK := x.Documents()
	if l.Scale == 0 {
		l.Scale = 1 / math.Sqrt(float64(l.Dim))
	}
	g := l.reference(cuQ, cuK)
	g.Softcap, g.Dropout, g.Seed = l.Softcap, l.Dropout, seed
	g.QuerySeq, g.KeySeq, g.BlockRows, g.BlockColumns = x.Seq(), x.KVSeq(), l.BlockRows, l.BlockColumns
	for h := range l.Heads {
		if l.Sinks {
			g.Sinks = append(g.Sinks, float64(sinkOf(h)))
		}
		if l.ALiBi {
			g.Slopes = append(g.Slopes, float64(slopeOf(h)))
		}
	}
	if l.BlockRows > 0 {
		g.Mask, _ = c.blocks(x)
	}
	whole := func(name uint64, seq, heads, dim int64) (v []float64) {
		for n := range x.Batch() {
			for i := range seq {
				for h := range heads {
					for d := range dim {
						v = append(v, float64(value(name, n, i, h, d)))
					}
				}
			}
		}
		return v
	}
	q, k := whole(nameQ, x.Seq(), g.Hq, g.D), whole(nameK, x.KVSeq(), g.Hkv, g.D)
	v, dout := whole(nameV, x.KVSeq(), g.Hkv, g.Dv), whole(nameDOut, x.Seq(), g.Hq, g.Dv)
	out, lse := ref.AttentionForward(g, q, k, v)
	d := ref.AttentionGradients(g, q, k, v, out, lse, dout)
	return [7][]float64{out, lse, d.DQ, d.DK, d.DV, d.DSinks, d.DSlopes}, nil
}

// compare returns an error if results are further than 2e-5 from float64, in max|Δ|/max|ref|, or
// than a few roundings of the terms if these cancel.
func (c *matrixCase) compare(got matrixResult, exact [7][]float64) error {
	for i, want := range exact {
		largest, worst := 0.0, 0.0
		for j, e := range want {
			x := float64(got[i][j])
			if math.IsInf(e, -1) && math.IsInf(x, -1) {
				continue
			}
			largest = max(largest, math.Abs(e))
			if d := math.Abs(x - e); !(d <= worst) {
				worst = d
			}
			if math.IsNaN(x) || math.IsInf(x, 0) {
				return fmt.Errorf("%s[%d] is %v, want %v", matrixNames[i], j, x, e)
			}
		}
		if rounding := max(1, largest) * 0x1p-22; !(worst <= max(2e-5*largest, rounding)) {
			return fmt.Errorf("%s: error %.3g of %.3g", matrixNames[i], worst, largest)
		}
	}
	return nil
}

// matrixMesh is a mesh of ranks and a form of its ring.
type matrixMesh struct {
	ranks                  int
	ring                   int64
	zigzag, gather, uneven bool
}

// unevenRows gives the first rank nothing and the others more and more rows.
func unevenRows(n int64, ranks int) []int64 {
	rows, left := make([]int64, ranks), n
	for r := 1; r < ranks; r++ {
		rows[r] = min(left, 2*int64(r)*n/int64(ranks*ranks))
		left -= rows[r]
	}
	rows[ranks-1] += left
	return rows
}

func (m matrixMesh) String() string {
	s := fmt.Sprintf("ulysses %d x ring %d", int64(m.ranks)/m.ring, m.ring)
	if m.zigzag {
		s += ", zigzag"
	}
	if m.gather {
		s += ", gather"
	}
	if m.uneven {
		s += ", uneven rows"
	}
	return s
}

func matrixMeshes() (meshes []matrixMesh) {
	for _, ranks := range []int{1, 2, 3, 4, 6, 8} {
		for ring := int64(1); ring <= int64(ranks); ring++ {
			if int64(ranks)%ring != 0 {
				continue
			}
			meshes = append(meshes, matrixMesh{ranks: ranks, ring: ring})
			if ranks > 1 {
				meshes = append(meshes, matrixMesh{ranks: ranks, ring: ring, uneven: true})
			}
			if ring > 1 {
				meshes = append(meshes, matrixMesh{ranks: ranks, ring: ring, zigzag: true},
					matrixMesh{ranks: ranks, ring: ring, gather: true},
					matrixMesh{ranks: ranks, ring: ring, zigzag: true, gather: true})
			}
		}
	}
	return meshes
}

// Every case has the results of float64 and sends the bytes that the plan predicts. Without a ring,
// out, lse, dq, dsinks and dslopes are bitwise equal to one rank; so are dk and dv of key heads
// that are on one rank.
func TestMatrix(t *testing.T) {
	meshes, cases := matrixMeshes(), 0
	benches := make([]*bench, 8)
	for i := range benches {
		benches[i] = newBench()
		defer benches[i].close()
	}
	for i, mask := range matrixMasks() {
		for j, shape := range slices.Concat(matrixShapes, packedShapes) {
			c := matrixCase{mask, shape}
			exact, err := c.exact()
			if err != nil {
				t.Fatal(err)
			}
			var one matrixResult
			for k, m := range meshes {
				if (i+j+k)%5 != 0 && m.ranks > 1 { // every mask on every mesh, with a fifth of the shapes
					continue
				}
				cases++
				got, err := c.on(benches, m)
				if m.ranks == 1 {
					one = got
				}
				if err == nil {
					err = c.compare(got, exact)
				}
				if err == nil && m.ring == 1 {
					err = c.sameAsOne(got, one, m.ranks)
				}
				if err != nil {
					t.Errorf("%v, %v: %v", m, &c, err)
				}
				for _, b := range benches {
					b.free()
				}
			}
		}
	}
	t.Logf("%d cases", cases)
}

// sameAsOne compares the results of Ulysses with one rank bitwise.
func (c *matrixCase) sameAsOne(got, one matrixResult, ranks int) error {
	shared := c.shape.kvHeads%int64(ranks) != 0 // some key head may have query heads on several ranks
	for i := range got {
		if shared && (i == 3 || i == 4) {
			continue
		}
		for j := range got[i] {
			if math.Float32bits(got[i][j]) != math.Float32bits(one[i][j]) {
				return fmt.Errorf("%s[%d] is %v, on one rank %v", matrixNames[i], j, got[i][j], one[i][j])
			}
		}
	}
	return nil
}

// Every option has the results of float64 on the plug-in, on every path, with and without
// documents.
func TestOptionsOnThePlugin(t *testing.T) {
	kind := devicetest.CUDA(t, "cuda", false)
	meshes := []matrixMesh{{ranks: 1, ring: 1}, {ranks: 3, ring: 1}, {ranks: 2, ring: 2, zigzag: true},
		{ranks: 3, ring: 3, gather: true}, {ranks: 4, ring: 2}}
	shapes := []matrixShape{matrixShapes[1], packedShapes[0]}
	for i, m := range meshes {
		if !slices.Contains(mpitest.Sizes(), m.ranks) {
			continue
		}
		t.Run(m.String(), func(t *testing.T) {
			for j, mask := range matrixMasks() {
				if strings.Contains(mask.name, " and ") { // pairs are tested on the CPU
					continue
				}
				c := matrixCase{mask, shapes[(i+j)%2]}
				exact, err := c.exact()
				if err != nil {
					t.Fatal(err)
				}
				got := c.empty(m.ranks)
				mpitest.Ranks(t, m.ranks, func(host comm.Comm) error {
					d, cm, done, err := kind.Open(host)
					if err != nil {
						return err
					}
					b := benchOn(d)
					defer b.close() // also closes the device
					if err := c.run(b, cm, m, &got); err != nil {
						return fmt.Errorf("%v: %w", &c, err)
					}
					return done()
				})
				c.sum(&got, m.ranks)
				if err := c.compare(got, exact); err != nil {
					t.Errorf("%v: %v", &c, err)
				}
			}
		})
	}
}
