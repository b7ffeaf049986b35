package data

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/testkit/tensorfile"
)

func file(t testing.TB, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func config(sequence int64, paths ...string) Config {
	return Config{Path: paths, Tokenizer: "bytes", TextField: "text", Sequence: sequence, Batch: 1, Accumulate: 1,
		Pack: true}
}

func open(t testing.TB, d Config, e EvalConfig, vocab int64) *Data {
	t.Helper()
	data, err := Open(d, e, Options{Vocab: vocab, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { data.Close() })
	return data
}

// whole returns all sequences of a set, each as a micro-batch.
func whole(t testing.TB, s *Set) []MicroBatch {
	t.Helper()
	var all []MicroBatch
	for r := range s.Sequences() {
		m, err := s.Range(r, r+1, nil)
		if err != nil {
			t.Fatal(err)
		}
		if want := []Sequence{{Number: r}}; m.First != r || !slices.Equal(m.Sequences, want) {
			t.Errorf("sequence %d has the number %d, and the micro-batch %v", r, m.First, m.Sequences)
		}
		m.scratch, m.labels, m.First, m.Sequences = [3][]int64{}, nil, 0, nil
		all = append(all, *m)
	}
	return all
}

// Wildcards match no dot at the start of a name. A pattern that has the dot matches it.
func TestHiddenFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a/1.txt", "a/.2.txt", ".b/3.txt", ".b/.4.txt"} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o700); err != nil {
			t.Fatal(err)
		}
		file(t, dir, name, name)
	}
	for pattern, want := range map[string][]string{"*/*.txt": {"a/1.txt"}, "a/../a/*": {"a/1.txt"},
		"*/.*.txt": {"a/.2.txt"}, ".*/*.txt": {".b/3.txt"}, ".b/*": {".b/3.txt"}, `\.b/.?.txt`: {".b/.4.txt"},
		"?b/*": nil} {
		got, err := glob("data.path", []string{dir + "/" + pattern})
		for i := range want {
			want[i] = filepath.Join(dir, want[i])
		}
		if !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%s: %q %v, want %q", pattern, got, err, want)
		}
	}
}

func TestPacking(t *testing.T) {
	dir := t.TempDir()
	a, b := file(t, dir, "a.txt", "abcde"),
		file(t, dir, "b.jsonl", "{\"text\":\"f\"}\n\n{\"text\":\"\"}\n{\"text\":\"gh\"}\r\n{\"n\":1,\"text\":\"ijk\"}")
	packed := open(t, config(4, a, b), EvalConfig{}, 256).Train()
	want := []MicroBatch{
		{IDs: []int32{'a', 'b', 'c', 'd'}, Targets: []int32{'b', 'c', 'd', -100}, Positions: []int32{0, 1, 2, 3},
			CuSeqlens: []int64{0, 4}, Valid: 3},
		{IDs: []int32{'e', 'f', 'g', 'h'}, Targets: []int32{-100, -100, 'h', -100}, Positions: []int32{0, 0, 0, 1},
			CuSeqlens: []int64{0, 1, 2, 4}, Valid: 1},
		{IDs: []int32{'i', 'j', 'k'}, Targets: []int32{'j', 'k', -100}, Positions: []int32{0, 1, 2},
			CuSeqlens: []int64{0, 3}, Valid: 2},
	}
	if got := whole(t, packed); !reflect.DeepEqual(got, want) {
		t.Errorf("packed\ngot  %v\nwant %v", got, want)
	}
	d := config(4, a, b)
	d.Pack = false
	single := open(t, d, EvalConfig{}, 256).Train()
	want = []MicroBatch{
		want[0],
		{IDs: []int32{'f'}, Targets: []int32{-100}, Positions: []int32{0}, CuSeqlens: []int64{0, 1}},
		{IDs: []int32{'g', 'h'}, Targets: []int32{'h', -100}, Positions: []int32{0, 1}, CuSeqlens: []int64{0, 2},
			Valid: 1},
		want[2],
	}
	if got := whole(t, single); !reflect.DeepEqual(got, want) {
		t.Errorf("not packed\ngot  %v\nwant %v", got, want)
	}
	if packed.Tokens() != 11 || packed.Cut() != 0 || single.Tokens() != 10 || single.Cut() != 1 {
		t.Error(packed, single)
	}
	if packed.Documents() != 4 || single.Longest() != 4 || packed.Steps(1, 2) != 2 ||
		(&Set{sequences: 10}).Steps(1.1, 1) != 11 || packed.Steps(0.1, 8) != 1 {
		t.Error(packed, single)
	}
}

// This is the example of DeepSpeed's own test: targets are shifted once, over the whole sequence,
// before it is sharded.
func TestShiftFixture(t *testing.T) {
	path := tensorfile.WriteTokens(t, filepath.Join(t.TempDir(), "t.safetensors"), 1, 6,
		map[string][]int64{"input_ids": {1, 10, 10, 10, 2, 2}})
	m := whole(t, open(t, config(6, path), EvalConfig{}, 11).Train())[0]
	for rank, want := range [][2][]int32{{{1, 10, 10}, {10, 10, 10}}, {{10, 2, 2}, {2, 2, -100}}} {
		lo, hi := 3*rank, 3*rank+3
		if !slices.Equal(m.IDs[lo:hi], want[0]) || !slices.Equal(m.Targets[lo:hi], want[1]) {
			t.Errorf("rank %d: ids %v targets %v", rank, m.IDs[lo:hi], m.Targets[lo:hi])
		}
	}
}

func TestTokens(t *testing.T) {
	path := tensorfile.WriteTokens(t, filepath.Join(t.TempDir(), "t.safetensors"), 2, 5, map[string][]int64{
		"input_ids":    {1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
		"labels":       {1, -100, 3, 4, 11, 6, 7, 8, -100, -100},
		"position_ids": {7, 8, 0, 1, 5, 0, 0, 3, 4, 0}})
	got := whole(t, open(t, config(5, path), EvalConfig{}, 12).Train())
	want := []MicroBatch{
		{IDs: []int32{1, 2, 3, 4, 5}, Targets: []int32{-100, -100, 4, 11, -100}, Positions: []int32{7, 8, 0, 1, 5},
			CuSeqlens: []int64{0, 2, 5}, Valid: 2},
		{IDs: []int32{6, 7, 8, 9, 10}, Targets: []int32{-100, 8, -100, -100, -100}, Positions: []int32{0, 0, 3, 4, 0},
			CuSeqlens: []int64{0, 1, 4, 5}, Valid: 1},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// join returns the global batch of a step, ordered by micro-batch and then by replica.
func join(t *testing.T, s *Set, step, replicas, batch, accumulate int64) (ids []int32, valid int64) {
	t.Helper()
	var m *MicroBatch
	for a := range accumulate {
		for d := range replicas {
			var err error
			if m, err = s.MicroBatch(step, a, d, replicas, batch, accumulate, m); err != nil {
				t.Fatal(err)
			}
			ids, valid = append(ids, m.IDs...), valid+m.Valid
			if last := m.CuSeqlens[len(m.CuSeqlens)-1]; last != int64(len(m.IDs)) || !slices.IsSorted(m.CuSeqlens) {
				t.Fatal(m.CuSeqlens, len(m.IDs))
			}
		}
	}
	return ids, valid
}

// Every mesh reads the same sequences in the same order, over several epochs, shuffled or not.
func TestOrderOnAnyMesh(t *testing.T) {
	dir := t.TempDir()
	text := ""
	for i := range 23 {
		text += fmt.Sprintf("%04d", i)
	}
	path := file(t, dir, "a.txt", text)
	for _, shuffle := range []bool{false, true} {
		d := config(4, path)
		d.Shuffle = shuffle
		s := open(t, d, EvalConfig{}, 256).Train()
		seen := map[string]int{}
		for step := range int64(23 * 2) {
			want, wantValid := join(t, s, step, 1, 4, 1)
			for _, m := range [][3]int64{{4, 1, 1}, {1, 1, 4}, {2, 2, 1}, {2, 1, 2}, {1, 2, 2}} {
				if got, valid := join(t, s, step, m[0], m[1], m[2]); !slices.Equal(got, want) || valid != wantValid {
					t.Fatalf("shuffle %v, step %d, mesh %v: %v, want %v", shuffle, step, m, got, want)
				}
			}
			for i := 0; i < len(want); i += 4 {
				seen[fmt.Sprint(want[i:i+4])]++
			}
			if first := fmt.Sprint(want[:4]); !shuffle &&
				first != fmt.Sprint([]int32{'0', '0', int32('0' + step*4%23/10), int32('0' + step*4%23%10)}) {
				t.Fatalf("step %d begins with %s", step, first)
			}
		}
		for sequence, n := range seen { // 46 steps of 4 sequences are 8 epochs
			if n != 8 {
				t.Errorf("shuffle %v: sequence %s was read %d times", shuffle, sequence, n)
			}
		}
		if len(seen) != 23 {
			t.Errorf("%d different sequences", len(seen))
		}
	}
}

func TestPermute(t *testing.T) {
	for _, n := range []int64{1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097} {
		orders := map[string]bool{}
		fixed := 0
		for epoch := range uint64(3) {
			seen, order := make([]bool, n), make([]int64, n)
			for i := range n {
				p := permute(i, n, 42, epoch)
				if p < 0 || p >= n || seen[p] {
					t.Fatalf("n %d: %d → %d", n, i, p)
				}
				seen[p], order[i] = true, p
				if p == i {
					fixed++
				}
			}
			orders[fmt.Sprint(order)] = true
		}
		if n >= 63 && (len(orders) != 3 || fixed > 20) {
			t.Errorf("n %d: %d orders in 3 epochs, %d fixed points", n, len(orders), fixed)
		}
	}
	if permute(3, 1000, 1, 0) == permute(3, 1000, 2, 0) && permute(4, 1000, 1, 0) == permute(4, 1000, 2, 0) {
		t.Error("the seed has no effect")
	}
}

func TestEvalSplit(t *testing.T) {
	dir := t.TempDir()
	lines := file(t, dir, "l.jsonl", "{\"text\":\"aa\"}\n{\"text\":\"bb\"}\n{\"text\":\"cc\"}\n")
	book := file(t, dir, "book.txt", "0123456789")
	toks := tensorfile.WriteTokens(t, filepath.Join(dir, "t.safetensors"), 3, 2,
		map[string][]int64{"input_ids": {1, 2, 3, 4, 5, 6}})
	one := tensorfile.WriteTokens(t, filepath.Join(dir, "one.safetensors"), 1, 2,
		map[string][]int64{"input_ids": {1, 2}})
	for _, c := range []struct {
		paths       []string
		split       float64
		train, eval []int32
	}{
		{[]string{lines}, 0.3, []int32{'a', 'a', 'b', 'b'}, []int32{'c', 'c'}},
		{[]string{lines}, 0.001, []int32{'a', 'a', 'b', 'b'}, []int32{'c', 'c'}},
		{[]string{lines}, 0.99, []int32{'a', 'a'}, []int32{'b', 'b', 'c', 'c'}},
		{[]string{book}, 0.2, []int32{'0', '1', '2', '3', '4', '5', '6', '7'}, []int32{'8', '9'}},
		{[]string{toks}, 0.34, []int32{1, 2, 3, 4}, []int32{5, 6}},
		{[]string{lines, toks, book}, 0.4, []int32{'a', 'a', 'b', 'b', 'c', 'c', 1, 2},
			[]int32{3, 4, 5, 6, '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'}},
		{[]string{one, lines}, 0.7, []int32{1, 2}, []int32{'a', 'a', 'b', 'b', 'c', 'c'}},
	} {
		data := open(t, config(2, c.paths...), EvalConfig{Split: c.split}, 256)
		ids := func(s *Set) (ids []int32) {
			for _, m := range whole(t, s) {
				ids = append(ids, m.IDs...)
			}
			return ids
		}
		if train, eval := ids(data.Train()), ids(data.Eval()); !slices.Equal(train, c.train) ||
			!slices.Equal(eval, c.eval) {
			t.Errorf("%v %v: train %v, eval %v", c.paths, c.split, train, eval)
		}
	}
	data := open(t, config(2, lines), EvalConfig{Path: []string{book}}, 256)
	if data.Train().Tokens() != 6 || data.Eval().Tokens() != 10 {
		t.Error(data.Train(), data.Eval())
	}
	if only := open(t, config(2), EvalConfig{Path: []string{book}}, 256); only.Train() != nil || only.Eval() == nil {
		t.Error("only evaluation data")
	}
	if m, err := data.Eval().Range(3, 5, nil); err != nil || fmt.Sprint(m.IDs) != "[54 55 56 57]" {
		t.Error(m, err)
	}
	if _, err := data.Eval().Range(3, 6, nil); err == nil {
		t.Error("a range after the end was accepted")
	}
}

// A MicroBatch that is passed again is reused without an allocation.
func TestMicroBatchReuse(t *testing.T) {
	dir := t.TempDir()
	s := open(t, config(64, file(t, dir, "a.txt", string(make([]byte, 1000)))), EvalConfig{}, 256).Train()
	m, err := s.MicroBatch(0, 0, 0, 1, 4, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	step := int64(0)
	if n := testing.AllocsPerRun(20, func() {
		step++
		if m, err = s.MicroBatch(step, 0, 0, 1, 4, 1, m); err != nil {
			t.Fatal(err)
		}
	}); n > 1 {
		t.Errorf("%v allocations a step", n)
	}
}

// Gather reads the sequences with the given numbers. They and the micro-batch, by which attention
// drops, have these numbers.
func TestGather(t *testing.T) {
	c := config(4, file(t, t.TempDir(), "a.txt", "abcdefghijklmnopqrstuvwx"))
	c.Shuffle = true
	set := open(t, c, EvalConfig{}, 257).Train()
	numbers := []int64{9, 2, 31}
	got, err := set.Gather(numbers, nil)
	if err != nil || got.First != 9 || len(got.Sequences) != 3 {
		t.Fatalf("%v, first %d, sequences %v", err, got.First, got.Sequences)
	}
	for i, n := range numbers {
		one, err := set.Ordered(n, 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		s := got.Sequences[i]
		if s.Number != n || !slices.Equal(got.IDs[s.At:s.At+int64(len(one.IDs))], one.IDs) {
			t.Errorf("sequence %d is %+v with %v, want %v", n, s, got.IDs, one.IDs)
		}
	}
}

// Each epoch has all sequences in an order of its own, which also depends on the seed.
func TestEpochsHaveTheirOrders(t *testing.T) {
	c := config(4, file(t, t.TempDir(), "a.txt", strings.Repeat("abcdefgh", 20)))
	c.Shuffle = true
	set := open(t, c, EvalConfig{}, 257).Train()
	n := set.Sequences()
	order := func(epoch int64) (all []int64) {
		for i := range n {
			all = append(all, set.sequence(epoch*n+i))
		}
		return all
	}
	first, second := order(0), order(1)
	set.seed++
	other := order(0)
	if slices.Equal(first, second) || slices.Equal(first, other) || slices.Equal(second, other) {
		t.Errorf("orders of two epochs %v and %v, with another seed %v", first, second, other)
	}
	for _, all := range [][]int64{first, second, other} {
		slices.Sort(all)
		for i, s := range all {
			if s != int64(i) {
				t.Fatalf("an epoch has the sequences %v", all)
			}
		}
	}
}
