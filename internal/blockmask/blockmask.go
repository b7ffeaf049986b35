// Package blockmask makes masks of block-sparse attention: which blocks of keys each block of
// queries sees, for each head. The patterns come from Sparse Transformers (Child et al. 2019,
// arXiv:1904.10509), BigBird (Zaheer et al. 2020, arXiv:2007.14062) and Longformer (Beltagy et al.
// 2020, arXiv:2004.05150), with the parameters of DeepSpeed's SparsityConfig classes.
//
// A mask is made for all heads, and a rank of Ulysses uses the heads that it computes. So a head
// has the same mask on every number of ranks. Two rules differ from DeepSpeed: a unidirectional
// mask has no block above the diagonal, also not in global or random columns, and random columns
// are a hash of seed, layer, head and row instead of the state of a global generator.
package blockmask

import (
	"math/bits"
	"slices"

	"ulysses/internal/splitmix"
	"ulysses/internal/status"
)

// Kind is a kind of pattern.
type Kind int

// The kinds, each with the parameters that it reads.
const (
	Dense              Kind = iota // all blocks
	Fixed                          // Local, Global, GlobalPatterns, Horizontal
	Variable                       // Random, Windows, Globals, GlobalEnds, Horizontal
	BigBird                        // Random, Window, Global
	BSLongformer                   // Window, Globals, GlobalEnds
	LocalSlidingWindow             // Window
)

var names = [...]string{"dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"}

func (k Kind) String() string {
	if k < 0 || int(k) >= len(names) {
		return "unknown"
	}
	return names[k]
}

// Pattern has a kind and its parameters. Default sets the defaults of a kind. Numbers are in
// blocks.
type Pattern struct {
	Kind   Kind
	Causal bool // unidirectional: a block sees no block after itself
	// PerHead gives each head its own random columns and global columns. Otherwise all heads have
	// the mask of head 0.
	PerHead    bool
	Horizontal bool // the rows of global columns see all blocks

	Local, Global  int64 // blocks of a group that see each other; global columns of a group
	GlobalPatterns int64 // the heads choose in turn between so many positions of global columns
	Window         int64 // width of a sliding window around the diagonal
	Random         int64 // random columns of a row
	Windows        []int64
	Globals        []int64 // global columns, or the first of each range
	GlobalEnds     []int64 // the ends of the ranges; nil = single columns
	Seed, Layer    int64   // of random columns
}

// Default returns the pattern of a kind with its defaults.
func Default(k Kind) Pattern {
	p := Pattern{Kind: k, Local: 4, Global: 1, GlobalPatterns: 1, Window: 3, Windows: []int64{4}, Globals: []int64{0}}
	p.Causal = k == LocalSlidingWindow
	if k == BigBird {
		p.Random = 1
	}
	return p
}

// Fill writes the mask [heads, n, n] of a sequence of n blocks: 1 where a block of queries (row)
// sees a block of keys (column), else 0. Parameters that contradict each other are InvalidArgument.
func (p *Pattern) Fill(mask []uint8, heads, n int64) error {
	if heads < 1 || n < 1 || int64(len(mask)) != heads*n*n {
		return fault("%d heads and %d blocks of a sequence, and a mask of %d elements; give 1 or more of each, and a mask [heads, blocks, blocks]",
			heads, n, len(mask))
	}
	if err := p.Check(n); err != nil {
		return err
	}
	clear(mask)
	for h := range heads {
		m := matrix{mask[h*n*n : (h+1)*n*n], n}
		if h > 0 && !p.PerHead {
			copy(m.bits, mask[:n*n])
			continue
		}
		p.head(m, h)
		if p.Causal {
			for r := range n {
				clear(m.bits[r*n+r+1 : (r+1)*n])
			}
		}
	}
	return nil
}

func fault(format string, args ...any) error {
	return status.Errorf(status.InvalidArgument, "blockmask: "+format, args...)
}

// Check returns an error, InvalidArgument, for parameters that contradict each other or the number
// of blocks of a sequence.
func (p *Pattern) Check(n int64) error {
	k := p.Kind
	if k < Dense || k > LocalSlidingWindow {
		return fault("kind %d is unknown; the kinds are 0 (dense) to %d (%v)", int(k), int(LocalSlidingWindow),
			LocalSlidingWindow)
	}
	if p.Horizontal && (k != Fixed && k != Variable) {
		return fault("%v has no horizontal global attention; leave it out", k)
	}
	if p.Horizontal && p.Causal {
		return fault("horizontal global attention with a unidirectional mask; make it bidirectional, or leave one out")
	}
	switch k {
	case Fixed:
		l, g, v := p.Local, p.Global, p.GlobalPatterns
		switch {
		case l < 1 || g < 1 || v < 1:
			return fault("fixed: %d local blocks, %d global blocks, %d global patterns; give 1 or more of each", l, g,
				v)
		case l%g != 0:
			return fault("fixed: %d local blocks are not a multiple of %d global blocks; choose such a multiple", l, g)
		case v > 1 && !p.PerHead:
			return fault("fixed: %d global patterns, and all heads have one mask; set different layouts for each head",
				v)
		case v > l/g:
			return fault("fixed: %d global patterns; a group of %d blocks has %d positions for %d global blocks", v,
				l, l/g, g)
		case n%l != 0 && n < g:
			return fault("fixed: %d global blocks in a sequence of %d blocks; use fewer", g, n)
		}
	case Variable:
		for _, w := range p.Windows {
			if w < 1 {
				return fault("variable: a local window of %d blocks; give 1 or more", w)
			}
		}
		if len(p.Windows) == 0 {
			return fault("variable: no local windows; give the blocks of at least one")
		}
	}
	if k == BigBird && (p.Global < 0 || p.Global > n) {
		return fault("bigbird: %d global blocks in a sequence of %d blocks; give 0 to %[2]d", p.Global, n)
	}
	if k >= BigBird && (p.Window < 1 || p.Window > n) {
		return fault("%v: a sliding window of %d blocks in a sequence of %d blocks; give 1 to %[3]d", k, p.Window, n)
	}
	if (k == Variable || k == BigBird) && (p.Random < 0 || p.Random > n) {
		return fault("%v: %d random blocks in a sequence of %d blocks; give 0 to %[3]d", k, p.Random, n)
	}
	if k != Variable && k != BSLongformer {
		return nil
	}
	if p.GlobalEnds != nil && len(p.GlobalEnds) != len(p.Globals) {
		return fault("%v: %d starts and %d ends of global blocks; give an end for each start", k, len(p.Globals),
			len(p.GlobalEnds))
	}
	for i, at := range p.Globals {
		if at < 0 {
			return fault("%v: global block %d; give 0 or more", k, at)
		}
		if p.GlobalEnds != nil && p.GlobalEnds[i] <= at {
			return fault("%v: global blocks %d to %d; an end must be larger than its start", k, at, p.GlobalEnds[i])
		}
	}
	return nil
}

// matrix is the mask of a head.
type matrix struct {
	bits []uint8
	n    int64
}

// block sets rows and columns, of which those outside of the matrix are left out.
func (m matrix) block(r0, r1, c0, c1 int64) {
	for r := max(0, r0); r < min(r1, m.n); r++ {
		for c := max(0, c0); c < min(c1, m.n); c++ {
			m.bits[r*m.n+c] = 1
		}
	}
}

// head writes the mask of a head. Blocks above the diagonal are cleared afterwards, if they must
// be.
func (p *Pattern) head(m matrix, h int64) {
	n := m.n
	switch p.Kind {
	case Dense:
		m.block(0, n, 0, n)
	case Fixed:
		l, g := p.Local, p.Global
		first := l - (1+h%p.GlobalPatterns)*g // of a group's global columns
		for at := int64(0); at < n; at += l {
			m.block(at, at+l, at, at+l)
			start := at + first
			if at+l > n { // the last group is shorter
				start = min(start, n-g)
			}
			p.global(m, start, start+g)
		}
	case Variable:
		p.random(m, h)
		for at, i := int64(0), 0; at < n; i++ {
			w := min(p.Windows[min(i, len(p.Windows)-1)], n-at)
			m.block(at, at+w, at, at+w)
			at += w
		}
		p.globals(m)
	case BigBird:
		p.random(m, h)
		p.window(m)
		m.block(0, p.Global, 0, n)
		m.block(0, n, 0, p.Global)
	case BSLongformer:
		p.window(m)
		p.globals(m)
	case LocalSlidingWindow:
		p.window(m)
	}
}

// window sets the blocks at most Window/2 from the diagonal.
func (p *Pattern) window(m matrix) {
	half := p.Window / 2
	for r := range m.n {
		m.block(r, r+1, r-half, r+half+1)
	}
}

// globals sets the global columns of Globals and GlobalEnds.
func (p *Pattern) globals(m matrix) {
	for i, at := range p.Globals {
		end := at + 1
		if p.GlobalEnds != nil {
			end = p.GlobalEnds[i]
		}
		p.global(m, at, end)
		if p.Kind == BSLongformer {
			m.block(at, end, 0, m.n)
		}
	}
}

// global sets global columns, and with Horizontal the rows of the same blocks.
func (p *Pattern) global(m matrix, start, end int64) {
	m.block(0, m.n, start, end)
	if p.Horizontal {
		m.block(start, end, 0, m.n)
	}
}

// random sets Random different columns of each row, or all if the row has fewer. Floyd's algorithm
// chooses them without a list of all columns (Bentley & Floyd 1987).
func (p *Pattern) random(m matrix, h int64) {
	chosen := make([]int64, 0, p.Random)
	for r := range m.n {
		columns := m.n
		if p.Causal {
			columns = r + 1
		}
		chosen = chosen[:0]
		for top := columns - min(p.Random, columns); top < columns; top++ {
			c := draw(top+1, p.Seed, p.Layer, h, r, top)
			if slices.Contains(chosen, c) {
				c = top
			}
			chosen = append(chosen, c)
			m.bits[r*m.n+c] = 1
		}
	}
}

// draw returns a number of [0, n) that is a hash of keys.
func draw(n int64, keys ...int64) int64 {
	x := uint64(0)
	for _, k := range keys {
		x = splitmix.Mix(x ^ splitmix.Mix(uint64(k)))
	}
	hi, _ := bits.Mul64(x, uint64(n))
	return int64(hi)
}
