package data

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/testkit/gathers"
)

// plainSequences makes sequences of documents in memory, without blocks.
func plainSequences(docs [][]int32, length int64, pack bool) (sequences []MicroBatch) {
	var ids []int32
	var starts []bool
	add := func() {
		m := MicroBatch{CuSeqlens: []int64{0}}
		for i, id := range ids {
			first := i == 0 || starts[i]
			if first && i > 0 {
				m.CuSeqlens = append(m.CuSeqlens, int64(i))
			}
			target := int32(Ignore)
			if i+1 < len(ids) && !starts[i+1] {
				target = ids[i+1]
				m.Valid++
			}
			m.IDs, m.Targets, m.Positions = append(m.IDs, id), append(m.Targets, target),
				append(m.Positions, int32(int64(i)-m.CuSeqlens[len(m.CuSeqlens)-1]))
		}
		m.CuSeqlens = append(m.CuSeqlens, int64(len(ids)))
		sequences = append(sequences, m)
		ids, starts = nil, nil
	}
	for _, doc := range docs {
		for i, id := range doc {
			if ids, starts = append(ids, id), append(starts, i == 0); pack && int64(len(ids)) == length || !pack &&
				(int64(len(ids)) == length || i == len(doc)-1) {
				add()
				if !pack {
					break
				}
			}
		}
	}
	if len(ids) > 0 {
		add()
	}
	return sequences
}

// corpus writes .txt and .jsonl files and returns their paths and the tokens of their documents.
func corpus(t testing.TB, seed int64) (paths []string, docs [][]int32) {
	t.Helper()
	dir, r := t.TempDir(), rand.New(rand.NewSource(seed))
	text := func(n int) string {
		s := make([]byte, n)
		for i := range s {
			s[i] = "abc \n\"\\é\t"[r.Intn(9)] & 0x7f
		}
		return string(s)
	}
	add := func(s string) {
		if len(s) > 0 {
			ids := make([]int32, len(s))
			for i := range s {
				ids[i] = int32(s[i])
			}
			docs = append(docs, ids)
		}
	}
	for k := range 7 {
		mark := []string{"", input.BOM}[(int64(k)+seed)%2] // a byte order mark is not text
		if k%3 == 1 {
			s := text(r.Intn(60))
			add(s)
			paths = append(paths, file(t, dir, fmt.Sprintf("%d.txt", k), mark+s))
			continue
		}
		var lines strings.Builder
		for range r.Intn(12) {
			s := text(r.Intn(3) * r.Intn(25))
			line, _ := json.Marshal(map[string]any{"n": len(s), "text": s})
			lines.WriteString(mark)
			lines.Write(line)
			lines.WriteString([]string{"\n", "\r\n", "\n\n", " \n"}[r.Intn(4)])
			add(s)
		}
		s := lines.String()
		if r.Intn(2) == 0 {
			s = strings.TrimRight(s, "\r\n ")
		}
		paths = append(paths, file(t, dir, fmt.Sprintf("%d.jsonl", k), s))
	}
	return paths, docs
}

// Sequences equal the result of plainSequences for any size of the blocks and of the cache and any
// number of ranks and goroutines, also if eval.split reserves documents.
func TestSequences(t *testing.T) {
	for seed := range int64(12) {
		paths, docs := corpus(t, seed)
		if len(docs) < 3 {
			t.Fatal("too few documents")
		}
		for _, pack := range []bool{true, false} {
			for _, block := range []int64{1, 5, 17, 64, 0} {
				for _, ranks := range []int{1, 3, 8} {
					d := config(1+7*(seed%4), paths...)
					d.Pack = pack
					e := EvalConfig{Split: []float64{0, 0.3, 0.9}[seed%3]}
					train, eval := docs, [][]int32(nil)
					if e.Split > 0 {
						n := len(docs) - min(max(int(e.Split*float64(len(docs))+0.5), 1), len(docs)-1)
						train, eval = docs[:n], docs[n:]
					}
					onRanks(t, ranks, func(c comm.Comm) {
						data,
							err := Open(d, e,
							Options{Vocab: 256, Seed: 1, Comm: c, Workers: 1 + int(seed%3), block: block,
								cache: []int64{1, 1000, 0}[seed%3]})
						if err != nil {
							t.Error(err)
							return
						}
						defer data.Close()
						for _, x := range []struct {
							set  *Set
							docs [][]int32
						}{{data.Train(), train}, {data.Eval(), eval}} {
							if x.docs == nil {
								continue
							}
							want := plainSequences(x.docs, d.Sequence, pack)
							if got := whole(t, x.set); !reflect.DeepEqual(got, want) {
								t.Errorf("seed %d, pack %v, blocks of %d, %d ranks:\ngot  %v\nwant %v", seed, pack,
									block, ranks, got, want)
							}
							tokens, longest := int64(0), int64(0)
							for _, m := range want {
								tokens, longest = tokens+int64(len(m.IDs)), max(longest, int64(len(m.IDs)))
							}
							if x.set.Tokens() != tokens || x.set.Longest() != longest ||
								x.set.Documents() != int64(len(x.docs)) {
								t.Errorf("seed %d, pack %v, blocks of %d: %s, want %d documents, %d tokens, longest %d",
									seed, pack, block, x.set.Identity(), len(x.docs), tokens, longest)
							}
						}
					})
				}
			}
		}
	}
}

// onRanks runs body on goroutine ranks. A single rank gets a nil communicator.
func onRanks(t testing.TB, ranks int, body func(c comm.Comm)) {
	t.Helper()
	if ranks == 1 {
		body(nil)
		return
	}
	var wg sync.WaitGroup
	for _, c := range comm.Local(ranks) {
		wg.Go(func() { body(c) })
	}
	wg.Wait()
}

// Every rank returns the error of the first fault in the order of the files.
func TestFirstFault(t *testing.T) {
	dir := t.TempDir()
	ok := strings.Repeat("{\"text\":\"abcdefgh\"}\n", 40)
	a := file(t, dir, "a.jsonl", "\n"+ok)
	b := file(t, dir, "b.jsonl", ok+"\n{\"text\":\"x\ufffd\"}\n"+ok+"{\n"+ok+"[]\n")
	txt := file(t, dir, "c.txt", strings.Repeat("y", 200)+"\xf0")
	for _, c := range []struct {
		paths []string
		vocab int64
		want  string
	}{
		{[]string{a, b, txt}, 256, b + ":83: the line is not JSON at byte 1"},
		{[]string{a, b, txt}, 128, b + ":42 (document 80), position 1: token id 239"},
		{[]string{a, txt, b}, 128, txt + " (document 40), position 200: token id 240"},
	} {
		for _, block := range []int64{1, 50, 333, 0} {
			for _, ranks := range []int{1, 2, 7} {
				onRanks(t, ranks, func(com comm.Comm) {
					_, err := Open(config(9, c.paths...), EvalConfig{},
						Options{Vocab: c.vocab, Comm: com, Workers: 3, block: block})
					if status.Of(err) != status.InvalidConfig || !strings.HasPrefix(err.Error(), c.want) {
						t.Errorf("blocks of %d, %d ranks: %v\nwant %s", block, ranks, err, c.want)
					}
				})
			}
		}
	}
}

// A file that is overwritten, truncated or removed while a job runs is an error.
func TestFilesChanged(t *testing.T) {
	line := "{\"text\":\"abcdefgh\"}\n"
	for name, content := range map[string]string{"a.jsonl": strings.Repeat(line, 9),
		"a.txt": strings.Repeat("abcdefgh", 9)} {
		path := file(t, t.TempDir(), name, content)
		for what, change := range map[string]func() error{
			"have changed since": func() error {
				return os.WriteFile(path, []byte(strings.ReplaceAll(content, "d", "e")), 0o600)
			},
			"it became shorter": func() error { return os.Truncate(path, int64(len(content)/2)) },
			"cannot be opened":  func() error { return os.Remove(path) },
		} {
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			data, err := Open(config(72, path), EvalConfig{}, Options{Vocab: 256, block: 16, cache: 1})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := data.Train().Range(0, 1, nil); err != nil {
				t.Fatal(err)
			}
			data.cache.close()
			if err := change(); err != nil {
				t.Fatal(err)
			}
			if _, err := data.Train().Range(0, 1, nil); status.Of(err) != status.IO ||
				!strings.Contains(err.Error(), what) || !strings.Contains(err.Error(), path) {
				t.Errorf("%s: %v, want %q", name, err, what)
			}
		}
	}
}

// If the files differ between ranks, all ranks return an error.
func TestFilesDiffer(t *testing.T) {
	dir := t.TempDir()
	a, b := file(t, dir, "a.txt", "abc"), file(t, dir, "b.txt", "abcd")
	onRanks(t, 2, func(c comm.Comm) {
		path := []string{a, b}[c.Rank()]
		if _, err := Open(config(3, path), EvalConfig{}, Options{Vocab: 256, Comm: c}); err == nil ||
			!strings.Contains(err.Error(), "a.txt") {
			t.Error(err)
		}
	})
	onRanks(t, 2, func(c comm.Comm) {
		path := []string{a, dir + "/gone.txt"}[c.Rank()]
		if _, err := Open(config(3, path), EvalConfig{}, Options{Vocab: 256, Comm: c}); status.Of(err) != status.IO ||
			err.Error() != "rank 1: data.path: "+dir+"/gone.txt: no such file" {
			t.Error(err)
		}
		both := config(3, dir+"/gone.txt") // no rank has it
		if _, err := Open(both, EvalConfig{}, Options{Vocab: 256, Comm: c}); status.Of(err) != status.IO ||
			err.Error() != "data.path: "+dir+"/gone.txt: no such file" {
			t.Error(err)
		}
	})
}

// If only some ranks have a chat template beside the tokenizer, all ranks return an error.
func TestTemplateOfOneRank(t *testing.T) {
	onRanks(t, 2, func(c comm.Comm) {
		dir := t.TempDir()
		d := config(3, file(t, dir, "a.txt", "abc"))
		d.ChatTemplate = dir
		if c.Rank() == 0 {
			file(t, dir, "chat_template.jinja", "{{ messages[0].content }}")
		}
		if _, err := Open(d, EvalConfig{}, Options{Vocab: 256, Comm: c}); err == nil || !strings.Contains(err.Error(),
			"data.chat_template: the files differ between rank 0") {
			t.Error(err)
		}
	})
}

// The cache does not exceed its limit, and its list and map have the same blocks.
func TestCache(t *testing.T) {
	path := file(t, t.TempDir(), "a.txt", strings.Repeat("0123456789", 1000))
	data, err := Open(config(10, path), EvalConfig{}, Options{Vocab: 256, block: 100, cache: 5000})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	var m *MicroBatch
	for _, i := range rand.New(rand.NewSource(1)).Perm(1000) {
		if m, err = data.Train().Range(int64(i), int64(i)+1, m); err != nil ||
			!slices.Equal(m.IDs, []int32{'0', '1', '2', '3', '4', '5', '6', '7', '8', '9'}) {
			t.Fatal(m, err)
		}
		if r := data.cache; r.bytes > r.limit || len(r.kept) != r.order.Len() || len(r.kept) == 0 {
			t.Fatalf("%d bytes in %d blocks, %d listed; at most %d bytes", r.bytes, len(r.kept), r.order.Len(), r.limit)
		}
	}
}

// A resumed run reads the same sequences: the sequences of a step do not depend on what was read
// before.
func TestResumedPosition(t *testing.T) {
	paths, _ := corpus(t, 3)
	for _, pack := range []bool{true, false} {
		d := config(8, paths...)
		d.Pack, d.Shuffle = pack, true
		whole := open(t, d, EvalConfig{}, 256).Train()
		var steps []MicroBatch
		for step := range int64(40) {
			m, err := whole.MicroBatch(step, 1, 1, 2, 2, 2, nil)
			if err != nil {
				t.Fatal(err)
			}
			steps = append(steps, *m)
		}
		for _, from := range []int64{1, 17, 39} {
			resumed := open(t, d, EvalConfig{}, 256).Train()
			for step := from; step < 40; step++ {
				m, err := resumed.MicroBatch(step, 1, 1, 2, 2, 2, nil)
				if err != nil || !reflect.DeepEqual(*m, steps[step]) {
					t.Fatalf("pack %v, resumed at %d: step %d has %v, want %v, %v", pack, from, step, m,
						steps[step], err)
				}
			}
		}
	}
}

// longUnit is a file whose scan does not end before the ranks have communicated again.
type longUnit struct {
	txtBytes
	calls <-chan struct{}
}

func (f *longUnit) scan(d *decoder, lo, hi int64) error {
	if err := gathers.Wait(f.calls); err != nil {
		return err
	}
	return f.txtBytes.scan(d, lo, hi)
}

// While a rank scans a long unit, the ranks communicate: a rank that waited for it in one call
// would end the job after parallel.timeout.
func TestLongUnit(t *testing.T) {
	path := file(t, t.TempDir(), "a.txt", "abcdef")
	onRanks(t, 2, func(c comm.Comm) {
		calls := make(chan struct{})
		o := &opener{Options: Options{Vocab: 256, Comm: gathers.New(c, calls)}, config: config(4)}
		found, _, err := o.scan([]format{&longUnit{txtBytes{path, 6, 6}, calls}})
		if err != nil || len(found) != 1 {
			t.Errorf("%v %v", found, err)
		}
	})
}
