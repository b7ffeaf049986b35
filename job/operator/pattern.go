package operator

import (
	"ulysses/internal/blockmask"
	"ulysses/internal/status"
	"ulysses/job/file"
)

// patterns has the kinds of attention.pattern.kind.
var patterns = map[string]blockmask.Kind{"fixed": blockmask.Fixed, "variable": blockmask.Variable,
	"bigbird": blockmask.BigBird, "longformer": blockmask.BSLongformer,
	"sliding": blockmask.LocalSlidingWindow}

// blockPattern returns the pattern of a job; nil if it has none. With a causal mask, no block above
// the diagonal is visible. seed is the seed of random columns.
func blockPattern(t *file.AttentionTable, seed int64) *blockmask.Pattern {
	kind, ok := patterns[t.Pattern.Kind]
	if !ok {
		return nil
	}
	p, x := blockmask.Default(kind), &t.Pattern
	p.Causal, p.PerHead, p.Horizontal, p.Seed = t.Causal, x.PerHead, x.Horizontal, seed
	for _, f := range []struct {
		given int64
		to    *int64
	}{{x.Local, &p.Local}, {x.Global, &p.Global}, {x.GlobalPatterns, &p.GlobalPatterns}, {x.Window, &p.Window},
		{x.Random, &p.Random}} {
		if f.given != 0 {
			*f.to = max(0, f.given)
		}
	}
	if len(x.Windows) > 0 {
		p.Windows = x.Windows
	}
	if len(x.Globals) > 0 {
		p.Globals = x.Globals
	}
	if len(x.GlobalEnds) > 0 {
		p.GlobalEnds = x.GlobalEnds
	}
	return &p
}

// checkPattern checks the pattern of the job's block mask, which the input must not have as well.
func (in *attentionInput) checkPattern(f *faultList) {
	if _, ok := in.file.Entry("block_mask"); ok {
		f.add(status.InvalidConfig,
			"attention.pattern.kind = %q: %s has a tensor block_mask as well; remove one of them", in.patternName,
			in.file.Path)
		return
	}
	if in.sq != in.sk {
		f.add(status.InvalidConfig,
			"attention.pattern.kind = %q: %d queries and %d keys, and a pattern has as many queries as keys; save a tensor block_mask",
			in.patternName, in.sq, in.sk)
		return
	}
	n, heads := (in.sq+in.block[0]-1)/in.block[0], int64(1)
	if in.pattern.PerHead {
		heads = in.hq
	}
	if err := in.pattern.Check(n); err != nil {
		f.add(status.InvalidConfig, "attention.pattern: %w", err)
		return
	}
	in.maskShape = []int64{heads, n, n}
}

// fillMask writes the elements of the mask, from the pattern or from the file.
func (in *attentionInput) fillMask(bits []byte) error {
	if in.pattern != nil {
		return in.pattern.Fill(bits, in.maskShape[0], in.maskShape[1])
	}
	return in.file.ReadAt(in.mask, 0, bits)
}
