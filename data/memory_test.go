package data

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// resident returns the resident memory of this process in bytes.
func resident(t testing.TB) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip("this system does not report the resident memory")
	}
	for _, line := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

// writeLines writes a .jsonl file of documents of about 4 KiB, each of which begins with its
// number.
func writeLines(t testing.TB, path string, size int64) (docs int64) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	out := bufio.NewWriterSize(f, 1<<20)
	r := rand.New(rand.NewSource(1))
	words := []string{"light", "colour", "the", "of", "refraction", "\n", "\"prism\"", "é", "blue", "a"}
	var bodies []string
	for range 50 {
		var s strings.Builder
		for n := 1000 + r.Intn(6000); s.Len() < n; {
			s.WriteString(words[r.Intn(len(words))] + " ")
		}
		text, _ := json.Marshal(s.String())
		bodies = append(bodies, string(text[1:]))
	}
	for n := int64(0); n < size; docs++ {
		k, err := fmt.Fprintf(out, "{\"id\":%d,\"text\":\"%08d %s}\n", docs, docs, bodies[r.Intn(len(bodies))])
		if err != nil {
			t.Fatal(err)
		}
		n += int64(k)
	}
	if err := out.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return docs
}

// The memory does not depend on the size of the file: 200 MB, or ULYSSES_TEST_DATA_MB.
// benchmarks/results/data.md has figures of larger files.
func TestMemory(t *testing.T) {
	size := int64(200)
	if s := os.Getenv("ULYSSES_TEST_DATA_MB"); s != "" {
		var err error
		if size, err = strconv.ParseInt(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	} else if testing.Short() {
		t.Skip("short")
	}
	path := filepath.Join(t.TempDir(), "large.jsonl")
	docs := writeLines(t, path, size*1e6)
	debug.FreeOSMemory()
	before := resident(t)
	var most atomic.Int64
	stop := make(chan bool)
	stopped := make(chan bool)
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				most.Store(max(most.Load(), resident(t)))
			}
		}
	}()
	begin := time.Now()
	d := config(1<<14, path)
	d.Pack, d.Shuffle = false, true
	data, err := Open(d, EvalConfig{Split: 0.01}, Options{Vocab: 256, Seed: 1, Workers: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	opened := time.Since(begin)
	begin = time.Now()
	var m *MicroBatch
	tokens := int64(0)
	for step := range int64(3000) {
		if m, err = data.Train().MicroBatch(step, 0, 0, 1, 1, 1, m); err != nil {
			t.Fatal(err)
		}
		tokens += int64(len(m.IDs))
		number := int64(0)
		for _, id := range m.IDs[:8] {
			number = 10*number + int64(id-'0')
		}
		if number != data.Train().sequence(step) {
			t.Fatalf("sequence %d is document %d", data.Train().sequence(step), number)
		}
	}
	read := time.Since(begin)
	close(stop)
	<-stopped
	t.Logf("%d MB in %d documents: opened in %.1f s (%.0f MB/s), %d shuffled sequences in %.2f s (%.0f a second, %.1f million tokens a second); at most %.0f MiB more resident memory, index %.1f MiB",
		size, docs, opened.Seconds(), float64(size)/opened.Seconds(), 3000, read.Seconds(), 3000/read.Seconds(),
		float64(tokens)/read.Seconds()/1e6, float64(most.Load()-before)/(1<<20),
		float64(64*len(data.train.sources[0].(*documentRange).blocks))/(1<<20))
	if data.Train().Documents()+data.Eval().Documents() != docs {
		t.Errorf("%d and %d documents of %d", data.Train().Documents(), data.Eval().Documents(), docs)
	}
	if more := most.Load() - before; more > 120<<20 {
		t.Errorf("the resident memory grew by %d MiB", more>>20)
	}
}
