package tokenizer

import (
	"math"

	"ulysses/internal/status"
)

const (
	shortWord  = 32      // symbols up to which mergeShort is faster than mergeLong
	longWord   = 48      // bytes from which a word is split where no rule can merge
	cachedWord = 64      // bytes up to which the ids of a word are cached
	cacheWords = 1 << 16 // words in the cache
	cacheIDs   = 1 << 19 // ids of the words in the cache
)

// merger is the memory of one goroutine for merging, with a cache of words.
type merger struct {
	cache   map[string][2]int32 // word → range of ids
	ids     []int32
	symbols []int32
	ranks   []uint64
	prev    []int32
	next    []int32
	heap    []uint64
	steps   int64 // of merging so far, for tests
}

// encode appends the ids of a word.
func (m *model) encode(w *merger, dst []int32, word []byte) ([]int32, error) {
	if m.ignoreMerges {
		if id, ok := m.vocab[string(word)]; ok {
			return append(dst, id), nil
		}
	}
	if len(word) <= longWord || m.prefix != "" || m.suffix != "" {
		return m.mergeWord(w, dst, word)
	}
	if len(word) > math.MaxInt32 {
		return dst, status.Errorf(status.Unsupported,
			"tokenizer: a word has %d bytes, which is more than 2 GiB; divide the text into documents", len(word))
	}
	// No merge crosses the boundary between two known characters that no rule merges. So the word
	// can be split there.
	start := 0
	var err error
	before, known := rune(0), false
	for i := 0; i < len(word); {
		r, n := m.charAt(word, i)
		now := m.character(r) >= 0
		if known && now {
			if _, ok := m.mergeable.get(before, r); !ok {
				if dst, err = m.mergeWord(w, dst, word[start:i]); err != nil {
					return dst, err
				}
				start = i
			}
		}
		before, known, i = r, now, i+n
	}
	return m.mergeWord(w, dst, word[start:])
}

// mergeWord appends the ids of a word that is not split further.
func (m *model) mergeWord(w *merger, dst []int32, word []byte) ([]int32, error) {
	if at, ok := w.cache[string(word)]; ok {
		return append(dst, w.ids[at[0]:at[1]]...), nil
	}
	symbols, err := m.symbols(w.symbols[:0], word)
	w.symbols = symbols
	if err != nil {
		return dst, err
	}
	w.steps += int64(len(symbols))
	if len(symbols) <= shortWord {
		symbols = m.mergeShort(w, symbols)
	} else {
		symbols = m.mergeLong(w, symbols)
	}
	if len(word) <= cachedWord {
		if w.cache == nil || len(w.cache) >= cacheWords || len(w.ids)+len(symbols) > cacheIDs {
			w.cache, w.ids = make(map[string][2]int32), w.ids[:0]
		}
		start := len(w.ids)
		w.ids = append(w.ids, symbols...)
		w.cache[string(word)] = [2]int32{int32(start), int32(len(w.ids))}
	}
	return append(dst, symbols...), nil
}

const never = math.MaxUint64

// rule returns rank<<32 | result of merging two symbols, or never.
func (m *model) rule(a, b int32) uint64 {
	if v, ok := m.rules.get(a, b); ok {
		return v
	}
	return never
}

// mergeShort merges in place. It looks at all pairs to find the next merge.
func (m *model) mergeShort(w *merger, s []int32) []int32 {
	if len(s) < 2 {
		return s
	}
	ranks := w.ranks[:0]
	for i := range len(s) - 1 {
		ranks = append(ranks, m.rule(s[i], s[i+1]))
	}
	w.ranks = ranks
	for {
		best, at := uint64(never), -1
		for i, r := range ranks {
			if r < best {
				best, at = r, i
			}
		}
		w.steps += int64(len(ranks))
		if at < 0 {
			return s
		}
		s[at] = int32(uint32(best))
		s = append(s[:at+1], s[at+2:]...)
		ranks = append(ranks[:at], ranks[at+1:]...)
		if at > 0 {
			ranks[at-1] = m.rule(s[at-1], s[at])
		}
		if at < len(ranks) {
			ranks[at] = m.rule(s[at], s[at+1])
		}
	}
}

// mergeLong merges with a heap of (rank, position) over a linked list of symbols, in n·log n steps.
func (m *model) mergeLong(w *merger, s []int32) []int32 {
	w.prev, w.next, w.heap = w.prev[:0], w.next[:0], w.heap[:0]
	for i := range s {
		w.prev, w.next = append(w.prev, int32(i-1)), append(w.next, int32(i+1))
	}
	w.next[len(s)-1] = -1
	for i := range len(s) - 1 {
		w.push(m.rule(s[i], s[i+1]), int32(i))
	}
	for len(w.heap) > 0 {
		top := w.pop()
		at := int32(uint32(top))
		if s[at] < 0 || w.next[at] < 0 {
			continue
		}
		right := w.next[at]
		now := m.rule(s[at], s[right])
		if now == never || now>>32 != top>>32 { // the pair has changed since
			continue
		}
		s[at], s[right] = int32(uint32(now)), -1
		if w.next[at] = w.next[right]; w.next[at] >= 0 {
			w.prev[w.next[at]] = at
			w.push(m.rule(s[at], s[w.next[at]]), at)
		}
		if p := w.prev[at]; p >= 0 {
			w.push(m.rule(s[p], s[at]), p)
		}
	}
	out := s[:0]
	for _, id := range s {
		if id >= 0 {
			out = append(out, id)
		}
	}
	return out
}

// push adds a pair to the heap, as rank<<32 | position.
func (w *merger) push(rule uint64, at int32) {
	if rule == never {
		return
	}
	h := append(w.heap, rule>>32<<32|uint64(uint32(at)))
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if h[up] <= h[i] {
			break
		}
		h[up], h[i] = h[i], h[up]
		i = up
		w.steps++
	}
	w.heap = h
}

// pop removes and returns the smallest pair.
func (w *merger) pop() uint64 {
	h := w.heap
	top, last := h[0], len(h)-1
	h[0] = h[last]
	h = h[:last]
	for i := 0; ; {
		w.steps++
		down := 2*i + 1
		if down >= last {
			break
		}
		if down+1 < last && h[down+1] < h[down] {
			down++
		}
		if h[i] <= h[down] {
			break
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
	w.heap = h
	return top
}
