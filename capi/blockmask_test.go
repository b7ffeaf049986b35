package main

import (
	"slices"
	"strings"
	"testing"
	"unsafe"

	"ulysses/internal/blockmask"
	"ulysses/internal/status"
)

// The C interface fills the masks of package blockmask, and 0 means its defaults.
func TestBlockMask(t *testing.T) {
	const heads, n = 3, 9
	windows, globals, ends := []int64{2, 1}, []int64{1, 4}, []int64{3, 5}
	for _, c := range []struct {
		desc cBlockPattern
		want func(p *blockmask.Pattern)
	}{
		{cBlockPattern{pattern: int32(blockmask.Dense)}, func(*blockmask.Pattern) {}},
		{cBlockPattern{pattern: int32(blockmask.Fixed), attention: 1, per_head: 1, local: 3, global_patterns: 3},
			func(p *blockmask.Pattern) {
				p.Causal, p.PerHead, p.Local, p.GlobalPatterns = true, true, 3, 3
			}},
		{cBlockPattern{pattern: int32(blockmask.Variable), horizontal: 1, n_windows: 2, windows: &windows[0],
			n_globals: 2, globals: &globals[0], global_ends: &ends[0]}, func(p *blockmask.Pattern) {
			p.Horizontal, p.Windows, p.Globals, p.GlobalEnds = true, windows, globals, ends
		}},
		{cBlockPattern{pattern: int32(blockmask.BigBird), per_head: 1, random: 2, global: -1, seed: 7, layer: 3},
			func(p *blockmask.Pattern) {
				p.PerHead, p.Random, p.Global, p.Seed, p.Layer = true, 2, 0, 7, 3
			}},
		{cBlockPattern{pattern: int32(blockmask.BSLongformer), window: 5}, func(p *blockmask.Pattern) { p.Window = 5 }},
		{cBlockPattern{pattern: int32(blockmask.LocalSlidingWindow), attention: 2}, func(p *blockmask.Pattern) {
			p.Causal = false
		}},
	} {
		c.desc.struct_size = uint32(unsafe.Sizeof(c.desc))
		got, want := make([]uint8, heads*n*n), make([]uint8, heads*n*n)
		must(t, blockMask(p(&c.desc), heads, n, p(&got[0])))
		pattern := blockmask.Default(blockmask.Kind(c.desc.pattern))
		c.want(&pattern)
		must(t, pattern.Fill(want, heads, n))
		if !slices.Equal(got, want) {
			t.Errorf("%v: %v, want %v", pattern.Kind, got, want)
		}
	}
	mask := make([]uint8, n*n)
	for want, d := range map[string]cBlockPattern{"kind 6": {pattern: 6}, "attention is 3": {attention: 3},
		"a list and its length": {n_windows: 1}, "not a multiple": {pattern: 1, global: 3},
		"sliding window of -2":                {pattern: 5, window: -2},
		"local is set, and the pattern dense": {local: 4}, "global is set": {pattern: 2, global: -1},
		"global_patterns is set": {pattern: 3, global_patterns: 1}, "window is set": {pattern: 1, window: 3},
		"random is set": {pattern: 4, random: 1}, "windows is set": {pattern: 3, n_windows: 1, windows: &windows[0]},
		"globals is set": {pattern: 5, n_globals: 1, globals: &globals[0]}} {
		d.struct_size = uint32(unsafe.Sizeof(d))
		err := blockMask(p(&d), 1, n, p(&mask[0]))
		refused(t, want, status.InvalidArgument, err)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want it to say %q", err, want)
		}
	}
	d := cBlockPattern{struct_size: uint32(unsafe.Sizeof(cBlockPattern{}))}
	refused(t, "no mask", status.InvalidArgument, blockMask(p(&d), 1, n, nil))
	refused(t, "no heads", status.InvalidArgument, blockMask(p(&d), 0, n, p(&mask[0])))
}
