package main

import (
	"slices"
	"unsafe"

	"ulysses/internal/blockmask"
)

// maxMask limits the elements of a mask.
const maxMask = int64(1) << 40

// blockMask writes the mask of a pattern.
func blockMask(desc unsafe.Pointer, heads, blocks int64, mask unsafe.Pointer) error {
	const op = "ulysses_block_mask"
	d, err := readStruct[cBlockPattern](op, "pattern", desc)
	if err != nil {
		return err
	}
	switch {
	case d.attention < 0 || d.attention > 2 || d.per_head&^1 != 0 || d.horizontal&^1 != 0:
		return invalid("%s: attention is %d, per_head %d and horizontal %d; give 0 to 2, and 0 or 1 for the others", op,
			d.attention, d.per_head, d.horizontal)
	case min(d.n_windows, d.n_globals) < 0 || max(d.n_windows, d.n_globals) > 1<<20:
		return invalid("%s: n_windows is %d and n_globals %d; give 0 to 2^20", op, d.n_windows, d.n_globals)
	case (d.windows == nil) != (d.n_windows == 0) || (d.globals == nil) != (d.n_globals == 0) || d.global_ends != nil &&
		d.globals == nil:
		return invalid("%s: a list and its length do not agree; set n_windows with windows, and n_globals with globals and global_ends, or leave all 0",
			op)
	case heads < 1 || blocks < 1 || blocks > 1<<20 || heads > maxMask/(blocks*blocks):
		return invalid("%s: %d heads and %d blocks; give 1 or more of each, and a mask of at most 2^40 elements", op,
			heads, blocks)
	case mask == nil:
		return invalid("%s: mask is NULL; give memory for %d bytes", op, heads*blocks*blocks)
	}
	if err := d.checkFields(op); err != nil {
		return err
	}
	p := blockmask.Default(blockmask.Kind(d.pattern))
	if d.attention != 0 {
		p.Causal = d.attention == 1
	}
	p.PerHead, p.Horizontal, p.Seed, p.Layer = d.per_head == 1, d.horizontal == 1, int64(d.seed), d.layer
	for _, f := range [...]struct {
		given int32
		dst   *int64
		none  bool // -1 is none
	}{{d.local, &p.Local, false}, {d.global, &p.Global, true}, {d.global_patterns, &p.GlobalPatterns, false},
		{d.window, &p.Window, false}, {d.random, &p.Random, true}} {
		switch {
		case f.given == -1 && f.none:
			*f.dst = 0
		case f.given != 0:
			*f.dst = int64(f.given)
		}
	}
	if d.windows != nil {
		p.Windows = int64s(d.windows, int64(d.n_windows))
	}
	if d.globals != nil {
		p.Globals, p.GlobalEnds = int64s(d.globals, int64(d.n_globals)), int64s(d.global_ends, int64(d.n_globals))
	}
	if err := p.Fill(unsafe.Slice((*uint8)(mask), heads*blocks*blocks), heads, blocks); err != nil {
		return invalid("%s: %w", op, err)
	}
	return nil
}

// checkFields returns an error for a number or list that the pattern does not have, and which would
// have no effect.
func (d *cBlockPattern) checkFields(op string) error {
	kind := blockmask.Kind(d.pattern)
	if kind < blockmask.Dense || kind > blockmask.LocalSlidingWindow {
		return nil // Fill refuses it
	}
	for _, f := range [...]struct {
		name  string
		given bool
		kinds []blockmask.Kind
	}{
		{"local", d.local != 0, []blockmask.Kind{blockmask.Fixed}},
		{"global", d.global != 0, []blockmask.Kind{blockmask.Fixed, blockmask.BigBird}},
		{"global_patterns", d.global_patterns != 0, []blockmask.Kind{blockmask.Fixed}},
		{"window", d.window != 0,
			[]blockmask.Kind{blockmask.BigBird, blockmask.BSLongformer, blockmask.LocalSlidingWindow}},
		{"random", d.random != 0, []blockmask.Kind{blockmask.Variable, blockmask.BigBird}},
		{"windows", d.windows != nil, []blockmask.Kind{blockmask.Variable}},
		{"globals", d.globals != nil, []blockmask.Kind{blockmask.Variable, blockmask.BSLongformer}},
	} {
		if f.given && !slices.Contains(f.kinds, kind) {
			return invalid("%s: %s is set, and the pattern %v does not have it; leave it out", op, f.name, kind)
		}
	}
	return nil
}
