package job

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/near"
)

// A run with documents packed by best fit has the same losses on every mesh, and goes on from a
// checkpoint as if it had not stopped. Its sequences have different lengths. A run with another
// packing does not resume from it.
func TestBestFitRun(t *testing.T) {
	var lines []string
	for i := range 90 {
		lines = append(lines,
			fmt.Sprintf(`{"text": "%d: %s"}`, i, strings.Repeat("the cat sat on the mat ", 9)[:1+i*i%39]))
	}
	path := filepath.Join(t.TempDir(), "a.jsonl")
	put(t, path, strings.Join(lines, "\n"))
	sets := []string{"data.path=" + path, "data.packing=best-fit", "data.shuffle_documents=true",
		"output.overwrite=true"}
	dir, run := newKept(t, sets...)
	if _, err := run(1); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	split, runSplit := newKept(t, sets[0], sets[2])
	if _, err := runSplit(1); err != nil || slices.Equal(losses(t, split), want) {
		t.Errorf("%v; the losses of best-fit are the ones of split", err)
	}
	_, err := runSplit(1, sets[1])
	expectFault(t, err, status.InvalidConfig, []string{"is of another run", "data.packing is best-fit, it was not set"})
	_, err = run(1, "data.packing=split")
	expectFault(t, err, status.InvalidConfig, []string{"is of another run", "data.packing is not set, it was best-fit"})
	for _, x := range []struct {
		ranks int
		mesh  string
	}{{2, "parallel.ulysses=2"}, {2, "parallel.ulysses=1"}, {4, "parallel.ulysses=4"}, {4, "parallel.ulysses=2"},
		{4, "parallel.ring=2"}} {
		if _, err := run(x.ranks, x.mesh, "checkpoint.resume=off", "parallel.zero=1"); err != nil {
			t.Fatal(x, err)
		}
		whole := losses(t, dir)
		near.Slice(t, fmt.Sprintf("%+v: losses", x), whole, want, 1e-5)
		drop(t, dir, 6)
		if _, err := run(x.ranks, x.mesh, "parallel.zero=1"); err != nil || !slices.Equal(losses(t, dir), whole) {
			t.Errorf("%+v, resumed after step 4: %v, losses %v, want %v", x, err, losses(t, dir), whole)
		}
	}
}
