package blockmask

import (
	"math"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// with returns the default pattern of a kind after a change.
func with(k Kind, change func(p *Pattern)) Pattern {
	p := Default(k)
	change(&p)
	return p
}

// text returns the mask of a head, with / between rows.
func text(mask []uint8, h, n int64) string {
	var rows []string
	for r := range n {
		row := ""
		for _, b := range mask[(h*n+r)*n:][:n] {
			row += string('0' + b)
		}
		rows = append(rows, row)
	}
	return strings.Join(rows, "/")
}

// lower clears the blocks above the diagonal of a mask.
func lower(layout string) string {
	rows := strings.Split(layout, "/")
	for i, r := range rows {
		rows[i] = r[:i+1] + strings.Repeat("0", len(r)-i-1)
	}
	return strings.Join(rows, "/")
}

// Masks are equal to the layouts of DeepSpeed's classes, without blocks above the diagonal in
// unidirectional ones.
func TestLayouts(t *testing.T) {
	uni := func(p *Pattern) { p.Causal = true }
	for _, c := range []struct {
		name    string
		pattern Pattern
		head, n int64
		want    string
	}{
		{"fixed, unidirectional", with(Fixed, uni), 0, 8,
			"10000000/11000000/11100000/11110000/00011000/00011100/00011110/00011111"},
		{"fixed, head 1 of 4 patterns",
			with(Fixed, func(p *Pattern) { p.Causal, p.PerHead, p.GlobalPatterns = true, true, 4 }), 1, 8,
			"10000000/11000000/11100000/11110000/00101000/00101100/00101110/00101111"},
		{"fixed, head 4 of 4 patterns",
			with(Fixed, func(p *Pattern) { p.Causal, p.PerHead, p.GlobalPatterns = true, true, 4 }), 4, 8,
			"10000000/11000000/11100000/11110000/00011000/00011100/00011110/00011111"},
		{"fixed, groups of 2", with(Fixed, func(p *Pattern) { p.Local = 2 }), 0, 6,
			"110101/110101/011101/011101/010111/010111"},
		{"fixed, a short last group", Default(Fixed), 0, 6, "111101/111101/111101/111101/000111/000111"},
		{"fixed, a short last group, unidirectional", with(Fixed, uni), 0, 6,
			"100000/110000/111000/111100/000110/000111"},
		{"fixed, horizontal", with(Fixed, func(p *Pattern) { p.Local, p.Horizontal = 2, true }), 0, 4,
			"1101/1111/0111/1111"},
		{"fixed, two global blocks",
			with(Fixed, func(p *Pattern) { p.Causal, p.PerHead, p.Global, p.GlobalPatterns = true, true, 2, 2 }), 1, 7,
			lower("1100000/1100000/1110000/1111000/1100110/1100110/1100111")},
		{"variable", with(Variable, func(p *Pattern) { p.Windows = []int64{1, 2, 3} }), 0, 8,
			"10000000/11100000/11100000/10011100/10011100/10011100/10000011/10000011"},
		{"variable, the rest in one window",
			with(Variable, func(p *Pattern) { p.Windows, p.Globals = []int64{2, math.MaxInt64}, nil }), 0, 5,
			"11000/11000/00111/00111/00111"},
		{"variable, unidirectional",
			with(Variable, func(p *Pattern) { p.Causal, p.Windows, p.Globals = true, []int64{1, 2}, []int64{0, 5} }), 0,
			8,
			"10000000/11000000/11100000/10010000/10011000/10000100/10000110/10000101"},
		{"variable, a range", with(Variable, func(p *Pattern) {
			p.Causal, p.Windows, p.Globals, p.GlobalEnds = true, []int64{2}, []int64{1}, []int64{3}
		}), 0, 6, lower("100000/111000/011000/011100/011010/011011")},
		{"variable, global blocks behind the end",
			with(Variable, func(p *Pattern) { p.Globals, p.GlobalEnds = []int64{2, 9}, []int64{40, 10} }), 0, 4,
			"1111/1111/1111/1111"},
		{"variable, horizontal",
			with(Variable, func(p *Pattern) { p.Windows, p.Globals, p.Horizontal = []int64{1}, []int64{1}, true }), 0,
			3, "110/111/011"},
		{"longformer", Default(BSLongformer), 0, 6, "111111/111000/111100/101110/100111/100011"},
		{"longformer, unidirectional", with(BSLongformer, uni), 0, 6,
			lower("111111/111000/111100/101110/100111/100011")},
		{"longformer, an even window", with(BSLongformer, func(p *Pattern) { p.Window = 4 }), 0, 7,
			"1111111/1111000/1111100/1111110/1011111/1001111/1000111"},
		{"sliding window", Default(LocalSlidingWindow), 0, 6, "100000/110000/011000/001100/000110/000011"},
		{"sliding window, bidirectional", with(LocalSlidingWindow, func(p *Pattern) { p.Causal = false }), 0, 4,
			"1100/1110/0111/0011"},
		{"bigbird without random blocks", with(BigBird, func(p *Pattern) { p.Random = 0 }), 0, 5,
			"11111/11100/11110/10111/10011"},
		{"dense", Default(Dense), 1, 2, "11/11"},
		{"dense, unidirectional", with(Dense, uni), 1, 2, "10/11"},
	} {
		heads := c.head + 1
		mask := make([]uint8, heads*c.n*c.n)
		if err := c.pattern.Fill(mask, heads, c.n); err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if got := text(mask, c.head, c.n); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// Random columns are a function of seed, layer, head and row; each row has as many as it should;
// and they are spread over all columns.
func TestRandomColumns(t *testing.T) {
	const heads, n = 40, 12
	fill := func(change func(p *Pattern)) []uint8 {
		p := with(BigBird, func(p *Pattern) { p.PerHead, p.Random, p.Window, p.Global = true, 3, 1, 0 })
		change(&p)
		mask := make([]uint8, heads*n*n)
		if err := p.Fill(mask, heads, n); err != nil {
			t.Fatal(err)
		}
		return mask
	}
	one := fill(func(*Pattern) {})
	if !slices.Equal(one, fill(func(*Pattern) {})) {
		t.Error("the same parameters give two masks")
	}
	for name, other := range map[string][]uint8{
		"seed": fill(func(p *Pattern) { p.Seed = 1 }), "layer": fill(func(p *Pattern) { p.Layer = 1 }),
		"the head": fill(func(p *Pattern) { p.PerHead = false }),
	} {
		if slices.Equal(one, other) {
			t.Errorf("the mask does not depend on %s", name)
		}
	}
	// Fewer heads have the masks of the first heads.
	few, p := make([]uint8, 3*n*n),
		with(BigBird, func(p *Pattern) { p.PerHead, p.Random, p.Window, p.Global = true, 3, 1, 0 })
	if err := p.Fill(few, 3, n); err != nil || !slices.Equal(few, one[:3*n*n]) {
		t.Errorf("3 heads have other masks than the first 3 of %d: %v", heads, err)
	}
	causal := fill(func(p *Pattern) { p.Causal = true })
	var columns [n]int
	for h := range heads {
		for r := range n {
			count := func(mask []uint8) (random int) {
				for c, b := range mask[(h*n+r)*n:][:n] {
					random += int(b)
					if b == 1 && c != r && &mask[0] == &one[0] {
						columns[c]++
					}
				}
				return random
			}
			if k := count(one); k != 3 && k != 4 { // the diagonal may be one of the 3
				t.Errorf("head %d, row %d has %d blocks", h, r, k)
			}
			if k, most := count(causal), min(3, r+1); k < most || k > most+1 {
				t.Errorf("unidirectional, head %d, row %d has %d blocks, want %d and the diagonal", h, r, k, most)
			}
		}
	}
	for c, k := range columns { // 40 heads × 11 rows × 3/12 on average
		if k < 70 || k > 150 {
			t.Errorf("column %d was drawn %d times of about 110", c, k)
		}
	}
}

// Parameters that contradict each other are refused.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		want    string
		pattern Pattern
		n       int64
	}{
		{"kind 9", Pattern{Kind: 9}, 8},
		{"not a multiple", with(Fixed, func(p *Pattern) { p.Global = 3 }), 8},
		{"all heads have one mask", with(Fixed, func(p *Pattern) { p.GlobalPatterns = 2 }), 8},
		{"has 4 positions", with(Fixed, func(p *Pattern) { p.GlobalPatterns, p.PerHead = 5, true }), 8},
		{"1 or more", with(Fixed, func(p *Pattern) { p.Local = 0 }), 8},
		{"use fewer", with(Fixed, func(p *Pattern) { p.Local, p.Global = 8, 4 }), 3},
		{"bidirectional", with(Fixed, func(p *Pattern) { p.Horizontal, p.Causal = true, true }), 8},
		{"bidirectional", with(Variable, func(p *Pattern) { p.Horizontal, p.Causal = true, true }), 8},
		{"no horizontal", with(BigBird, func(p *Pattern) { p.Horizontal = true }), 8},
		{"larger than its start", with(Variable, func(p *Pattern) { p.Globals, p.GlobalEnds = []int64{3}, []int64{3} }),
			8},
		{"an end for each start", with(BSLongformer, func(p *Pattern) { p.GlobalEnds = []int64{3, 4} }), 8},
		{"global block -1", with(BSLongformer, func(p *Pattern) { p.Globals = []int64{-1} }), 8},
		{"no local windows", with(Variable, func(p *Pattern) { p.Windows = nil }), 8},
		{"window of 0", with(Variable, func(p *Pattern) { p.Windows = []int64{0} }), 8},
		{"random blocks", with(Variable, func(p *Pattern) { p.Random = 9 }), 8},
		{"random blocks", with(BigBird, func(p *Pattern) { p.Random = -1 }), 8},
		{"global blocks", with(BigBird, func(p *Pattern) { p.Global = 9 }), 8},
		{"sliding window", with(BigBird, func(p *Pattern) { p.Window = 9 }), 8},
		{"sliding window", with(BSLongformer, func(p *Pattern) { p.Window = 9 }), 8},
		{"sliding window", with(LocalSlidingWindow, func(p *Pattern) { p.Window = 0 }), 8},
		{"give 1 or more", Default(Dense), 0},
	} {
		mask := make([]uint8, 2*c.n*c.n)
		err := c.pattern.Fill(mask, 2, c.n)
		if status.Of(err) != status.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
	p := Default(Dense)
	if err := p.Fill(make([]uint8, 7), 2, 2); status.Of(err) != status.InvalidArgument {
		t.Errorf("a mask of 7 elements: %v", err)
	}
}
