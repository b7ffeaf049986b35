package flight

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"
)

// world is four ranks in two sequences of two.
type world struct {
	t     *testing.T
	dir   string
	ranks []*Recorder
	seq   []map[Group]int64
}

var all = Group{"world", 0, 1, 4}

func sequence(rank int) Group { return Group{"sequence", rank / 2 * 2, 1, 2} }

func newWorld(t *testing.T) *world {
	w := &world{t: t, dir: filepath.Join(t.TempDir(), "run[12]", "flight")} // no pattern
	if err := Prepare(w.dir); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		r := New(i, 4, fmt.Sprintf("n%d", i/2))
		if err := r.Attach(w.dir); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Close() })
		w.ranks, w.seq = append(w.ranks, r), append(w.seq, map[Group]int64{})
	}
	return w
}

// begin begins an operation on a rank, and end ends it.
func (w *world) begin(rank int, op string, g Group) func() {
	w.seq[rank][g]++
	n := w.ranks[rank].Begin(op, g, w.seq[rank][g], 64, false, 0)
	return func() { w.ranks[rank].End(n) }
}

// together runs an operation on all ranks of a group to its end.
func (w *world) together(op string, g Group) {
	for i := range w.ranks {
		if g.Has(i) {
			defer w.begin(i, op, g)()
		}
	}
}

// ago sets the time of a rank's last sign of life.
func (w *world) ago(rank int, d time.Duration) {
	r := w.ranks[rank]
	r.mu.Lock()
	defer r.mu.Unlock()
	r.head.Beat = r.now() - int64(d)
}

func (w *world) diagnose() *Diagnosis {
	w.t.Helper()
	ranks, err := ReadFolder(w.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	return Diagnose(ranks)
}

// alive shows that all processes run.
func (w *world) alive() {
	for _, r := range w.ranks {
		r.Beat(false)
	}
}

func TestDiagnose(t *testing.T) {
	for name, c := range map[string]struct {
		fault func(w *world)
		want  string // ranks of the culprits
		texts []string
	}{
		"a rank is late": {func(w *world) {
			w.together("all-reduce", all)
			w.together("all-to-all", sequence(2))
			for _, i := range []int{0, 1, 2} {
				w.begin(i, "all-reduce", all)
			}
			w.alive()
		}, "3", []string{"rank 3 on host n1 is late; 3 ranks wait for it in all-reduce #2 on axis world (ranks 0 to 3)",
			"last operation was all-to-all #1 on axis sequence (ranks 2 and 3)"}},
		"a chain of ranks": {func(w *world) {
			// 0 waits for 1 on its sequence; 1, 2 wait for 3 on the world, 3 is late
			w.begin(1, "all-to-all", sequence(1))()
			w.begin(0, "all-to-all", sequence(0))()
			w.begin(0, "all-to-all", sequence(0))
			w.begin(1, "all-reduce", all)
			w.begin(2, "all-reduce", all)
			w.alive()
		}, "3", []string{"rank 3", "2 ranks wait for it in all-reduce #1"}},
		"a stopped process": {func(w *world) {
			for i := range 4 {
				w.begin(i, "all-reduce", all)
			}
			w.alive()
			w.ago(2, 5*time.Second)
		}, "2", []string{"rank 2 on host n1 does not respond", "5.0 s before; it is in all-reduce #1"}},
		"a killed process, and the others have a signal": {func(w *world) {
			for _, i := range []int{0, 1, 3} {
				w.begin(i, "all-reduce", all)
				w.ranks[i].Signal()
			}
			w.alive()
			w.ago(2, time.Second)
		}, "2", []string{"rank 2 on host n1 does not respond", "3 ranks wait for it in all-reduce #1"}},
		"a skipped operation": {func(w *world) {
			w.together("barrier", all)
			for _, i := range []int{0, 1, 3} {
				w.begin(i, "all-reduce", all)
			}
			w.begin(2, "all-gather", all)
			w.alive()
		}, "2", []string{
			"rank 2 on host n1 has called all-gather where 3 ranks have called all-reduce: operation #2 on axis world"}},
		"two ranks and two operations": {func(w *world) {
			w.begin(0, "all-reduce", sequence(0))
			w.begin(1, "all-gather", sequence(0))
			w.alive()
		}, "0 1", []string{"where other ranks have called another operation"}},
		"another size": {func(w *world) {
			for i := range 4 {
				size := int64(16)
				if i == 1 {
					size = 8
				}
				w.seq[i][all]++
				w.ranks[i].Begin("all-reduce", all, 1, 64, false, Checksum(3, []int64{size}))
				w.ranks[i].Finish(Failed, "all-reduce: truncated")
			}
		}, "1", []string{
			"rank 1 on host n0 has called all-reduce where 3 ranks have called it with another size or type: operation #1"}},
		"a message of another length": {func(w *world) {
			for i := range 4 {
				w.begin(i, "all-to-all", all)
				w.ranks[i].Blame([]int{2, 2, 0, 2}[i])
				w.ranks[i].Finish(Failed, "all-to-all: the message of a rank")
			}
		}, "2", []string{
			"rank 2 on host n1 has sent a message of another length than its receiver expects, as 3 ranks say"}},
		"a rank that failed": {func(w *world) {
			for _, i := range []int{0, 1, 2} {
				w.begin(i, "all-reduce", all)
			}
			w.alive()
			w.ranks[3].Finish(Failed, "no space left on device\nmore")
		}, "3", []string{"rank 3 on host n1 failed: no space left on device; 3 ranks wait"}},
		"an early end": {func(w *world) {
			for _, i := range []int{0, 1, 2} {
				w.begin(i, "all-reduce", all)
			}
			w.ranks[3].Finish(Finished, "")
			w.alive()
		}, "3", []string{"has finished while others continue"}},
		"no record": {func(w *world) {
			w.begin(0, "all-reduce", all)
			w.alive()
			os.Remove(File(w.dir, 1))
		}, "1", []string{"rank 1 has left no record"}},
		"a cycle": {func(w *world) {
			w.begin(0, "all-to-all", sequence(0))
			w.begin(1, "all-reduce", all)
			w.begin(2, "all-reduce", all)
			w.begin(3, "all-reduce", all)
			w.ranks[0].Step(3)
			w.ranks[1].Step(4)
			w.alive()
		}, "0", []string{"waits for ranks [1], which wait for it"}},
		"the network": {func(w *world) {
			for i := range 4 {
				w.begin(i, "all-reduce", all)
			}
			w.alive()
		}, "", []string{"4 ranks have begun all-reduce #1", "check the network"}},
		"nothing": {func(w *world) { w.together("all-reduce", all); w.alive() }, "", []string{"no rank waits"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c.fault(w)
			d := w.diagnose()
			var ranks []string
			for _, x := range d.Culprits {
				ranks = append(ranks, fmt.Sprint(x.Rank))
			}
			if got := strings.Join(ranks, " "); got != c.want {
				t.Errorf("culprits %q, want %q: %s", got, c.want, d.Text)
			}
			for _, text := range c.texts {
				if !strings.Contains(d.Text, text) {
					t.Errorf("%q is not in: %s", text, d.Text)
				}
			}
		})
	}
}

// If no rank is behind, the text names the operation in which most ranks are.
func TestUndecided(t *testing.T) {
	in := func(op string) Standing { return Standing{Condition: Inside, Operation: op} }
	x, y, z := in("all-reduce #1"), in("all-reduce #2"), in("all-to-all #1")
	for range 50 {
		for want, all := range map[string][]Standing{
			": 3 ranks have begun all-reduce #2 and": {z, x, y, y, x, y},
			": 2 ranks have begun all-reduce #1 and": {z, x, y, y, x},
			": no rank waits":                        {x, y, z},
		} {
			if s := (*comparison)(nil).undecided(all); !strings.Contains(s, want) {
				t.Fatalf("%q, want %q", s, want)
			}
		}
	}
}

// An operation that began after the last sign of life has lasted 0 s, and not less.
func TestYoungOperation(t *testing.T) {
	w := newWorld(t)
	for i := range w.ranks {
		w.ago(i, time.Second)
		w.begin(i, "all-gather", Group{Axis: "world", Stride: 1, Size: 4})
	}
	for _, s := range w.diagnose().Ranks {
		if s.Seconds != 0 || s.For != 0 {
			t.Errorf("rank %d is in its operation for %v", s.Rank, s.For)
		}
	}
}

// The ring keeps the last operations, recording allocates nothing, and a record of private memory
// moves into the file.
func TestRing(t *testing.T) {
	dir := t.TempDir()
	r := New(1, 4, "here")
	r.Begin("first", all, 1, 8, true, 0)
	if err := r.Attach(dir); err != nil {
		t.Fatal(err)
	}
	back, err := Read(File(dir, 1))
	if err != nil || len(back.Calls) != 1 || !back.Calls[0].InProgress || !back.Calls[0].Control ||
		back.Calls[0].Began > 0 || back.Host != "here" || back.PID != os.Getpid() {
		t.Fatalf("%+v %v", back, err)
	}
	seq := int64(1)
	if n := testing.AllocsPerRun(Capacity,
		func() { seq++; r.End(r.Begin("all-reduce", all, seq, 8, false, 0)) }); n != 0 {
		t.Errorf("%v allocations an operation", n)
	}
	r.Begin("all-gather", all, seq+1, 8, false, 0)
	r.Step(7)
	if back, err = Read(File(dir, 1)); err != nil || len(back.Calls) != Capacity || back.Step != 7 {
		t.Fatalf("%d calls, step %d, %v", len(back.Calls), back.Step, err)
	}
	for i, c := range back.Calls {
		if want := seq + 2 - Capacity + int64(i); c.Seq != want || c.InProgress != (i == Capacity-1) {
			t.Fatalf("call %d: %+v, want #%d", i, c, want)
		}
	}
	r.Close()
	r.End(r.Begin("after", all, 1, 1, false, 0))
	if _, err := Read(File(dir, 1)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file remains: %v", err)
	}
	var none *Recorder
	none.End(none.Begin("x", all, 1, 1, false, 0))
	none.Beat(true)
}

// Records of an earlier run are kept apart, damaged files are refused, and one rank decides.
func TestFolder(t *testing.T) {
	w := newWorld(t)
	w.begin(0, "barrier", all)
	w.alive()
	if err := w.ranks[0].WriteStacks(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(StackFile(w.dir, 0)); err != nil || !strings.Contains(string(b), "TestFolder") {
		t.Errorf("%s %v", b, err)
	}
	d, err := Decide(w.dir)
	if err != nil || d == nil || len(d.Culprits) == 0 {
		t.Fatalf("%+v %v", d, err)
	}
	if d, err := Decide(w.dir); d != nil || err != nil {
		t.Errorf("a second decision: %+v %v", d, err)
	}
	if err := Prepare(w.dir); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFolder(w.dir); err == nil {
		t.Error("old records remain")
	}
	old := filepath.Join(w.dir, previous)
	if ranks, err := ReadFolder(old); err != nil || len(ranks) != 4 {
		t.Errorf("%d records, %v", len(ranks), err)
	}
	damaged := t.TempDir()
	for text, want := range map[string]string{"{": "", `{"culprits": [{"rank": 0}]}`: "it names rank 0 of 0 ranks",
		`{"ranks": [{"rank": 0}], "culprits": [{"rank": -1}]}`: "it names rank -1 of 1 ranks"} {
		if err := os.WriteFile(filepath.Join(damaged, verdictFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Find(damaged); err == nil || !strings.Contains(err.Error(), verdictFile+" is damaged: "+want) ||
			!strings.Contains(err.Error(), "; remove it") {
			t.Errorf("%s: %v", text, err)
		}
	}
	// A record that somebody truncates does not end the run.
	if err := os.Truncate(File(old, 1), 0); err != nil {
		t.Fatal(err)
	}
	if w.together("all-reduce", all); w.ranks[1].Dir() != "" || w.ranks[0].Dir() == "" {
		t.Error("the file of rank 1 is still in use, or that of rank 0 is not")
	}
	if err := os.WriteFile(File(old, 1), []byte{}, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(File(old, 1), []byte(magic), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFolder(old); err == nil || !strings.Contains(err.Error(), "rank-00001.flight is not a record") {
		t.Error(err)
	}
	// A record whose header was lost, except for its beginning and version.
	b, err := os.ReadFile(File(old, 0))
	if err != nil {
		t.Fatal(err)
	}
	clear(b[12:headerSize])
	if err := errors.Join(os.Remove(File(old, 1)), os.WriteFile(File(old, 0), b, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFolder(old); err == nil ||
		!strings.Contains(err.Error(), "rank-00000.flight is damaged: it has rank 0 of 0 ranks; remove it") {
		t.Error(err)
	}
	// A record whose number of ranks was lost.
	binary.NativeEndian.PutUint32(b[unsafe.Offsetof(header{}.Size):], 1<<31)
	if err := os.WriteFile(File(old, 0), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFolder(old); err == nil ||
		!strings.Contains(err.Error(), "is damaged: it has rank 0 of 2147483648 ranks; remove it") {
		t.Error(err)
	}
}
