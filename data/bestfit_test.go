package data

import (
	"fmt"
	"math/rand"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
)

// plainBestFit is best fit decreasing by trying all bins for each item.
func plainBestFit(lengths []int64, size int64) (bins [][]int) {
	left := map[int]bool{}
	for i := range lengths {
		left[i] = true
	}
	var rooms []int64
	for len(left) > 0 {
		item := -1
		for i := range lengths {
			if left[i] && (item < 0 || lengths[i] > lengths[item]) {
				item = i
			}
		}
		delete(left, item)
		to := -1
		for b, room := range rooms {
			if room >= lengths[item] && (to < 0 || room < rooms[to]) {
				to = b
			}
		}
		if to < 0 {
			to, rooms, bins = len(rooms), append(rooms, size), append(bins, nil)
		}
		rooms[to] -= lengths[item]
		bins[to] = append(bins[to], item)
	}
	for _, b := range bins {
		slices.Sort(b)
	}
	slices.SortFunc(bins, func(a, b []int) int { return a[0] - b[0] })
	return bins
}

func TestBestFitDecreasing(t *testing.T) {
	if got, want := bestFitDecreasing([]int64{8, 3, 8, 6, 5, 2}, 8),
		[][]int{{0}, {1, 4}, {2}, {3, 5}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	r := rand.New(rand.NewSource(1))
	for n := range 60 {
		size := int64(1 + r.Intn(40))
		lengths := make([]int64, n)
		for i := range lengths {
			lengths[i] = 1 + r.Int63n(size)
		}
		if got, want := bestFitDecreasing(lengths, size), plainBestFit(lengths, size); !reflect.DeepEqual(got, want) {
			t.Errorf("%v in bins of %d: %v, want %v", lengths, size, got, want)
		}
	}
}

// lengthsOf returns a packedRange of documents of the given lengths, packed by best fit.
func lengthsOf(lengths []int64, maxLength int64) *packedRange {
	x := &index{docs: int64(len(lengths))}
	for _, n := range lengths {
		x.starts = append(x.starts, x.tokens)
		x.tokens += n
	}
	p := &packedRange{documentRange: &documentRange{index: x, hi: x.tokens, count: x.docs, maxLength: maxLength}}
	p.packBestFit(func(k int64) int64 { return k })
	return p
}

// A window has 4096 documents, or more if they do not fill 64 sequences. No document is packed with
// one of another window.
func TestWindows(t *testing.T) {
	r := rand.New(rand.NewSource(2))
	for _, c := range []struct{ documents, most, maxLength, window int64 }{
		{10000, 64, 64, windowDocuments},
		{40000, 3, 512, 0}, // about 16384 documents fill 64 sequences
	} {
		lengths := make([]int64, c.documents)
		for i := range lengths {
			lengths[i] = 1 + r.Int63n(c.most)
		}
		p := lengthsOf(lengths, c.maxLength)
		windowOf, number, documents, tokens := map[int64]int64{}, int64(0), int64(0), int64(0)
		for i, start := range p.starts {
			windowOf[start] = number
			documents, tokens = documents+1, tokens+lengths[i]
			if documents >= windowDocuments && tokens >= windowSequences*c.maxLength {
				if c.window > 0 && documents != c.window {
					t.Errorf("a window of %d documents", documents)
				}
				number, documents, tokens = number+1, 0, 0
			}
		}
		if number < 2 {
			t.Fatalf("%d windows", number)
		}
		seen, last := map[int64]bool{}, int64(0)
		for i := range p.sequences() {
			all := p.of(i)
			for k, s := range all {
				if seen[s.lo] || windowOf[s.lo] != windowOf[all[0].lo] || k > 0 && s.lo < all[k-1].hi {
					t.Fatalf("sequence %d has the documents %v", i, all)
				}
				seen[s.lo] = true
			}
			if windowOf[all[0].lo] == windowOf[last] && all[0].lo < last {
				t.Fatalf("sequence %d begins with token %d, the one before with token %d", i, all[0].lo, last)
			}
			last = all[0].lo
			if n, _ := p.length(i); n > c.maxLength {
				t.Fatalf("sequence %d has %d tokens", i, n)
			}
		}
		least := (p.index.tokens + c.maxLength - 1) / c.maxLength
		if len(seen) != len(lengths) || p.sequences() > least+least/50+number+1 {
			t.Errorf("%d of %d documents, in %d sequences; %d would be full", len(seen), len(lengths),
				p.sequences(), least)
		}
	}
}

// text returns tokens as text.
func text(ids []int32) string {
	b := make([]byte, len(ids))
	for i, id := range ids {
		b[i] = byte(id)
	}
	return string(b)
}

// Documents are whole, in one sequence each, with positions and borders of their own, for every
// size of the blocks and number of ranks. A document that is longer than a sequence is split after
// each data.sequence tokens, and its rest is packed with others.
func TestBestFit(t *testing.T) {
	dir := t.TempDir()
	var lines []string
	want := map[string]int{}
	longest := strings.Repeat("long", 33) // 132 tokens: 64, 64 and 4
	for i := range 200 {
		s := fmt.Sprintf("<%d%s>", i, strings.Repeat("x", i*i*7%53))
		if i == 70 {
			s = longest
			want[s[:64]], want[s[128:]] = 2, 1
		} else {
			want[s] = 1
		}
		lines = append(lines, fmt.Sprintf(`{"text": "%s"}`, s))
	}
	a, b := file(t, dir, "a.jsonl", strings.Join(lines[:120], "\n")),
		file(t, dir, "b.jsonl", strings.Join(lines[120:], "\n"))
	c := config(64, a, b)
	tokens := open(t, c, EvalConfig{}, 256).Train().Tokens()
	c.Packing = BestFit
	var first []MicroBatch
	for _, block := range []int64{50, 1000, 0} {
		for _, ranks := range []int{1, 2, 4} {
			onRanks(t, ranks, func(cm comm.Comm) {
				d, err := Open(c, EvalConfig{Path: []string{b}},
					Options{Vocab: 256, Comm: cm, Workers: 2, block: block})
				if err != nil {
					t.Error(err)
					return
				}
				defer d.Close()
				all := whole(t, d.Train())
				if cm != nil && cm.Rank() > 0 {
					if !reflect.DeepEqual(all, first) {
						t.Errorf("blocks of %d, rank %d of %d: other sequences", block, cm.Rank(), ranks)
					}
					return
				}
				if first == nil {
					first = all
				} else if !reflect.DeepEqual(all, first) {
					t.Errorf("blocks of %d, %d ranks: other sequences", block, ranks)
				}
				if s := d.Train(); s.Tokens() != tokens || s.Documents() != 200 || s.Longest() != 64 ||
					s.Sequences() != int64(len(all)) {
					t.Errorf("%s; want %d tokens of 200 documents", s.Identity(), tokens)
				}
				for _, m := range whole(t, d.Eval()) { // evaluation data are packed in the same way
					if s := text(m.IDs); s[0] != '<' || s[len(s)-1] != '>' {
						t.Errorf("a sequence of the evaluation has parts of documents: %s", s)
					}
				}
			})
		}
	}
	for _, m := range first {
		for k := 1; k < len(m.CuSeqlens); k++ {
			lo, hi := m.CuSeqlens[k-1], m.CuSeqlens[k]
			want[text(m.IDs[lo:hi])]--
			for i := lo; i < hi; i++ {
				target := int32(Ignore)
				if i+1 < hi {
					target = m.IDs[i+1]
				}
				if m.Positions[i] != int32(i-lo) || m.Targets[i] != target {
					t.Fatalf("token %d of %q: position %d, target %d", i-lo, text(m.IDs[lo:hi]), m.Positions[i],
						m.Targets[i])
				}
			}
		}
	}
	for s, n := range want {
		if n != 0 {
			t.Errorf("%q is missing %d times", s, n)
		}
	}
	// Documents one after another, without splitting them, need far more sequences. Two sequences
	// are full of the long document.
	room, inOrder := int64(0), 2
	for _, l := range lines {
		n := int64(len(l) - len(`{"text": ""}`))
		if n %= 64; room < n {
			room, inOrder = 64, inOrder+1
		}
		room -= n
	}
	least := int((tokens + 63) / 64)
	if waste, before := len(first)-least, inOrder-least; 10*waste > 2*before {
		t.Errorf("%d sequences of 64 tokens, with documents in order %d; %d would be full", len(first), inOrder, least)
	}
}

// Sequences equal the ones that plainBestFit makes of the documents in memory, for files of text,
// lines and Megatron's, any blocks and ranks, also if eval.split reserves documents.
func TestBestFitOfFiles(t *testing.T) {
	packed := func(docs [][]int32, size int) (sequences []MicroBatch) {
		var chunks [][]int32
		var lengths []int64
		for _, d := range docs {
			for p := range slices.Chunk(d, size) {
				chunks, lengths = append(chunks, p), append(lengths, int64(len(p)))
			}
		}
		for _, bin := range plainBestFit(lengths, int64(size)) {
			var in [][]int32
			for _, i := range bin {
				in = append(in, chunks[i])
			}
			sequences = append(sequences, plainSequences(in, int64(size), true)...)
		}
		return sequences
	}
	var ids [][]int32
	for _, sequences := range megatronDocuments(t)["uint16"] {
		if doc := slices.Concat(sequences...); len(doc) > 0 {
			ids = append(ids, doc)
		}
	}
	for seed := range int64(4) {
		paths, docs := corpus(t, seed)
		paths, docs = append(paths, filepath.Join(megatronGoldens, "uint16.bin")), append(docs, ids...)
		c := config(1+9*(seed%4), paths...)
		c.Packing = BestFit
		e := EvalConfig{Split: []float64{0, 0.3}[seed%2]}
		n := len(docs) - int(e.Split*float64(len(docs))+0.5)
		for _, block := range []int64{64, 128, 0} {
			for _, ranks := range []int{1, 3} {
				onRanks(t, ranks, func(cm comm.Comm) {
					d, err := Open(c, e, Options{Vocab: 65536, Comm: cm, Workers: 2, block: block})
					if err != nil {
						t.Error(err)
						return
					}
					defer d.Close()
					if want := packed(docs[:n], int(c.Sequence)); !reflect.DeepEqual(whole(t, d.Train()), want) {
						t.Errorf("seed %d, blocks of %d, %d ranks: other sequences than %v", seed, block, ranks, want)
					}
					if e.Split > 0 && !reflect.DeepEqual(whole(t, d.Eval()), packed(docs[n:], int(c.Sequence))) {
						t.Errorf("seed %d, blocks of %d, %d ranks: other sequences for evaluation", seed, block, ranks)
					}
				})
			}
		}
	}
}

// Documents are shuffled before they are packed: documents of equal lengths have other neighbors.
func TestShuffledBestFit(t *testing.T) {
	var lines []string
	for i := range 400 {
		lines = append(lines, fmt.Sprintf(`{"text": "%04d"}`, i))
	}
	c := config(16, file(t, t.TempDir(), "a.jsonl", strings.Join(lines, "\n")))
	c.Packing = BestFit
	neighbors := func(seed uint64) (n int, all string) {
		d, err := Open(c, EvalConfig{}, Options{Vocab: 256, Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		seen := map[string]bool{}
		for _, m := range whole(t, d.Train()) {
			var last int
			for k := 0; k < len(m.IDs); k += 4 {
				s, number := text(m.IDs[k:k+4]), 0
				fmt.Sscan(strings.TrimLeft(s, "0")+" 0", &number)
				if k > 0 && number == last+1 {
					n++
				}
				seen[s], last = true, number
			}
			all += text(m.IDs)
		}
		if len(seen) != 400 {
			t.Errorf("%d of 400 documents", len(seen))
		}
		return n, all
	}
	if n, _ := neighbors(1); n != 300 {
		t.Errorf("in the order of the files: %d neighbors in 100 sequences of 4", n)
	}
	c.ShuffleDocuments = true
	n, one := neighbors(1)
	_, two := neighbors(2)
	if n > 10 || one == two {
		t.Errorf("shuffled: %d neighbors; another seed gives the same sequences: %v", n, one == two)
	}
}
