package data

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
)

// The order of a mixture is Megatron's: computed here as its helpers.cpp does, one sequence after
// the other. It may be asked for in any order.
func TestMixture(t *testing.T) {
	weights, sizes := []float64{3, 1, 0.5, 1}, []int64{10, 7, 3, 100000}
	m := newMixture(weights, sizes)
	drawn := make([]int64, 4)
	var want [][2]int64
	for n := range int64(3*windowSize + 100) {
		best, most := 0, 0.0
		for i, w := range weights {
			if e := w/5.5*max(float64(n), 1) - float64(drawn[i]); i == 0 || e > most {
				best, most = i, e
			}
		}
		want = append(want, [2]int64{int64(best), drawn[best]})
		drawn[best]++
	}
	for _, n := range []int64{3*windowSize + 50, 0, windowSize, windowSize - 1, 2*windowSize + 7, 1, 2, 3} {
		if s, k := m.at(n); [2]int64{int64(s), k} != want[n] {
			t.Errorf("number %d: source %d, index %d; want %v", n, s, k, want[n])
		}
	}
	for n := range want {
		if s, k := m.at(int64(n)); [2]int64{int64(s), k} != want[n] {
			t.Fatalf("number %d: source %d, index %d; want %v", n, s, k, want[n])
		}
	}
	for i, w := range weights {
		if share := float64(drawn[i]) - w/5.5*float64(len(want)); !(math.Abs(share) <= 1) {
			t.Errorf("source %d has %d of %d sequences", i, drawn[i], len(want))
		}
	}
	// Each epoch of a source has all of its sequences.
	seen := map[int64]int{}
	for n := int64(0); n < 2000; n++ {
		if s := m.sequence(n, true, 5); s < 10 {
			seen[s]++
		}
	}
	for s := range int64(10) {
		if c := seen[s]; c < seen[0]-1 || c > seen[0]+1 {
			t.Errorf("sequence %d was drawn %d times, sequence 0 %d times", s, c, seen[0])
		}
	}
}

// mixed writes files of three sources and returns the tables.
func mixed(t *testing.T) Config {
	dir := t.TempDir()
	var a, b []string
	for i := range 30 {
		a = append(a, fmt.Sprintf(`{"text": "a%d%s"}`, i, strings.Repeat("x", i*5%23)))
		b = append(b, fmt.Sprintf(
			`{"messages": [{"role": "user", "content": "%d"}, {"role": "assistant", "content": "b%s"}]}`, i,
			strings.Repeat("y", i*3%17)))
	}
	c := config(16)
	c.Path, c.Shuffle, c.ShuffleDocuments, c.ChatTemplate = nil, true, true, file(t, dir, "t.jinja", tags)
	c.Source = []SourceConfig{
		{Path: []string{file(t, dir, "a.jsonl", strings.Join(a, "\n"))}, Weight: 2},
		{Path: []string{file(t, dir, "b.jsonl", strings.Join(b, "\n"))}, Weight: 1, Format: "messages"},
		{Path: []string{file(t, dir, "c.txt", strings.Repeat("c", 100))}, Weight: 0.5},
	}
	return c
}

// The sequences of a step are the same on every number of ranks, replicas and micro-batches, for
// every size of blocks, and when the run continues at any step.
func TestMixedStepsAreTheSame(t *testing.T) {
	for _, packing := range []string{Split, BestFit} {
		t.Run(packing, func(t *testing.T) { mixedStepsAreTheSame(t, packing) })
	}
}

func mixedStepsAreTheSame(t *testing.T, packing string) {
	c := mixed(t)
	c.Packing = packing
	const steps, sequences = 40, 4
	read := func(t *testing.T, d *Data, from int64, replicas, accumulate int64) (all [][]int32) {
		batch := sequences / replicas / accumulate
		for step := from; step < steps; step++ {
			for a := range accumulate {
				for r := range replicas {
					m, err := d.Train().MicroBatch(step, a, r, replicas, batch, accumulate, nil)
					if err != nil {
						t.Fatal(err)
					}
					for i, s := range m.Sequences {
						end := int64(len(m.IDs))
						if i+1 < len(m.Sequences) {
							end = m.Sequences[i+1].At
						}
						all = append(all, append(slices.Clone(m.IDs[s.At:end]), m.Targets[s.At:end]...))
					}
				}
			}
		}
		return all
	}
	one := open(t, c, EvalConfig{}, 256)
	want := read(t, one, 0, 1, 1)
	count := map[int32]int{}
	for _, s := range want {
		for _, id := range []int32{'x', 'y', 'c'} {
			if slices.Contains(s, id) {
				count[id]++
			}
		}
	}
	if count['x'] < 60 || count['y'] < 30 || count['c'] < 15 {
		t.Errorf("sequences by source: %v", count)
	}
	for _, from := range []int64{1, 7, 39} {
		again := open(t, c, EvalConfig{}, 256)
		if !reflect.DeepEqual(read(t, again, from, 1, 1), want[from*sequences:]) {
			t.Errorf("a run that continues at step %d reads other sequences", from)
		}
	}
	for _, ranks := range []int{2, 3, 4} {
		err := comm.RunLocal(ranks, func(c2 comm.Comm) error {
			d, err := Open(c, EvalConfig{}, Options{Vocab: 256, Seed: 1, Comm: c2, Workers: 2, block: 70})
			if err != nil {
				return err
			}
			defer d.Close()
			for _, mesh := range [][2]int64{{1, 2}, {2, 1}, {4, 1}, {2, 2}} {
				if !reflect.DeepEqual(read(t, d, 0, mesh[0], mesh[1]), want) {
					t.Errorf("%d ranks, %v: other sequences", ranks, mesh)
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// Documents are packed in a drawn order: each document is there once, whole and in its order, and
// attention does not cross their borders.
func TestShuffledDocuments(t *testing.T) {
	dir := t.TempDir()
	var lines []string
	want := map[string]bool{}
	for i := range 200 {
		s := fmt.Sprintf("<%d%s>", i, strings.Repeat("x", i*7%29))
		lines, want[s] = append(lines, fmt.Sprintf(`{"text": "%s"}`, s)), true
	}
	c := config(64, file(t, dir, "a.jsonl", strings.Join(lines[:120], "\n")),
		file(t, dir, "b.jsonl", strings.Join(lines[120:], "\n")))
	c.ShuffleDocuments = true
	var text []byte
	borders := map[int]bool{}
	d := open(t, c, EvalConfig{Split: 0.1}, 256)
	for _, m := range whole(t, d.Train()) {
		for _, b := range m.CuSeqlens {
			borders[len(text)+int(b)] = true
		}
		for _, id := range m.IDs {
			text = append(text, byte(id))
		}
	}
	var order []string
	at := 0
	for _, s := range strings.SplitAfter(string(text), ">") {
		if s == "" {
			continue
		}
		if !borders[at] {
			t.Errorf("%s has no border", s)
		}
		at += len(s)
		if !want[s] {
			t.Errorf("%s is not a document, or is there twice", s)
		}
		delete(want, s)
		order = append(order, s)
	}
	for _, m := range whole(t, d.Eval()) { // the last documents of the files, in their order
		for _, id := range m.IDs {
			text = append(text, byte(id))
		}
	}
	for _, s := range lines[180:] {
		delete(want, strings.Split(s, `"`)[3])
	}
	if len(want) > 0 || len(order) != 180 {
		t.Errorf("%d documents in training; missing %v", len(order), want)
	}
	inOrder := 0
	for i := 1; i < len(order); i++ {
		if strings.Contains(lines[i], order[i]) {
			inOrder++
		}
	}
	if inOrder > 10 {
		t.Errorf("%d documents are at their position in the files", inOrder)
	}
}
