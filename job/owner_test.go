package job

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ulysses/internal/status"
)

// tree returns all files below a folder with their contents.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			all[path] = text(t, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func entries(t *testing.T, dir string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}

func removeAll(t *testing.T, path string) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
}

func mkdir(t *testing.T, path string) {
	t.Helper()
	if err := os.Mkdir(path, 0o777); err != nil {
		t.Fatal(err)
	}
}

// A run that starts afresh in a folder with results of another run is refused, on any number of
// ranks, and changes nothing. With output.overwrite it replaces the results. A resumed run needs no
// flag.
func TestUsedFolder(t *testing.T) {
	dir, run := newKept(t, "output.trace=[1,2]")
	out := filepath.Join(dir, "out")
	const all = "metrics.jsonl, report.html, trace.json, model/"
	for _, x := range []struct {
		name, first, second, found string
	}{
		{"without checkpoints", "checkpoint.every=0", "checkpoint.every=0", all},
		{"another seed", "checkpoint.every=0", "checkpoint.every=0 seed=6", all},
		{"afresh", "train.steps=6", "checkpoint.resume=off", all + ", checkpoints/ up to step 6"},
		{"afresh, without a model", "train.steps=6", "checkpoint.resume=off output.model=false output.trace=[]",
			"metrics.jsonl, report.html, checkpoints/ up to step 6"},
		{"an evaluation's", "kind=eval eval.split=0.2 output.trace=[]", "eval.split=0.2", "metrics.jsonl, report.html"},
	} {
		removeAll(t, out)
		if _, err := run(2, strings.Fields(x.first)...); err != nil {
			t.Fatalf("%s: %v", x.name, err)
		}
		before := tree(t, out)
		for _, ranks := range []int{1, 2, 4} {
			_, err := run(ranks, strings.Fields(x.second)...)
			expectFault(t, err, status.InvalidConfig,
				[]string{"job.toml:", "output.dir: " + out + " has results of another run (" + x.found +
					"); choose another output.dir, or set output.overwrite = true (--force)"})
			if !maps.Equal(tree(t, out), before) {
				t.Errorf("%s: files were changed", x.name)
			}
		}
		if _, err := run(2, append(strings.Fields(x.second), "output.overwrite=true")...); err != nil ||
			len(readMetrics(t, filepath.Join(out, "metrics.jsonl"))) < 6 {
			t.Errorf("%s, with output.overwrite: %v", x.name, err)
		}
	}
	// --force sets output.overwrite.
	removeAll(t, out)
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := call(filepath.Join(dir, "job.toml"), "-n", "2", "--set", "checkpoint.resume=off",
		"--force"); code != status.OK {
		t.Errorf("--force: %v: %s", code, errs)
	}
	// A checkpoint of another run is refused, also with --force.
	_, err := run(2, "seed=7", "output.overwrite=true")
	expectFault(t, err, status.InvalidConfig,
		[]string{"is of another run: seed is 7, it was 5",
			`use another output.dir, or set checkpoint.resume = "off" and output.overwrite = true to start afresh`})

	// A run that resumes from a checkpoint of another folder writes into its own folder.
	elsewhere := filepath.Join(dir, "elsewhere")
	state := "checkpoint.resume=" + filepath.Join(out, "checkpoints", "step-00000004")
	if _, err := run(2, "output.dir="+elsewhere, state); err != nil {
		t.Error(err)
	}
	before := tree(t, elsewhere)
	_, err = run(2, "output.dir="+elsewhere, state)
	expectFault(t, err, status.InvalidConfig,
		[]string{"output.dir: " + elsewhere +
			" has results of another run (metrics.jsonl, report.html, model/, checkpoints/ up to step 6)"})
	if !maps.Equal(tree(t, elsewhere), before) {
		t.Error("a checkpoint of elsewhere: files were changed")
	}
	// Empty files, and files that no run writes, are not refused.
	removeAll(t, elsewhere)
	putIn(t, filepath.Join(elsewhere, "notes.txt"), "mine")
	putIn(t, filepath.Join(elsewhere, "metrics.jsonl"), "")
	for _, steps := range []string{"train.steps=4", "train.steps=6"} {
		if _, err := run(2, "output.dir="+elsewhere, "optimizer.schedule=constant", steps); err != nil {
			t.Error(err)
		}
	}
	if names := entries(t, elsewhere); !slices.Equal(names,
		[]string{"checkpoints", "metrics.jsonl", "model", "notes.txt", "report.html", "trace.json"}) {
		t.Errorf("a finished run leaves %v", names)
	}
}

// A run that ended before its first checkpoint starts again. Another run is refused in its folder.
func TestEndedBeforeACheckpoint(t *testing.T) {
	dir, run := newKept(t, "checkpoint.every=0", "optimizer.clip=0.0")
	for _, x := range []string{"killed", "failed"} {
		if x == "failed" {
			if _, err := run(2, "optimizer.lr=1e18", "optimizer.warmup=0"); status.Of(err) != status.Numeric {
				t.Fatal(err)
			}
		} else if out, err := child(dir, "ULYSSES_TEST_SETS=checkpoint.every=0 optimizer.clip=0.0",
			"ULYSSES_FAULT=kill:1:3").CombinedOutput(); err == nil {
			t.Fatalf("%s", out)
		}
		if len(losses(t, dir)) == 0 {
			t.Fatalf("%s: no line of a step", x)
		}
		_, err := run(2, "seed=6")
		expectFault(t, err, status.InvalidConfig, []string{"has results of another run (metrics.jsonl"})
		if _, err := run(2, "kind=eval"); err != nil { // leaves the run unchanged
			t.Error(err)
		}
		if _, err := run(1); err != nil || len(losses(t, dir)) != 6 {
			t.Errorf("%s, and run again: %v, %d steps", x, err, len(losses(t, dir)))
		}
		_, err = run(2) // the run is finished now
		expectFault(t, err, status.InvalidConfig,
			[]string{"has results of another run (metrics.jsonl, report.html, model/)"})
		removeAll(t, filepath.Join(dir, "out"))
	}
}

// No result is written through a link in output.dir. output.dir may itself be a link.
func TestLinksInOutputDir(t *testing.T) {
	dir, run := newKept(t, "output.trace=[1,2]")
	real, other := filepath.Join(dir, "real"), filepath.Join(dir, "other")
	out := link(t, "real", filepath.Join(dir, "out"))
	putIn(t, filepath.Join(other, "file"), "mine")
	putIn(t, filepath.Join(other, "sub", "config.json"), "mine")
	for _, x := range []struct{ name, to string }{
		{"metrics.jsonl", "../other/file"}, {"report.html", "../other/file"}, {"trace.json", "../other/file"},
		{"model", "../other/sub"}, {"checkpoints", "../other/sub"},
		{"metrics.jsonl", "nowhere"}, {".owner.json", "../other/file"},
	} {
		removeAll(t, real)
		mkdir(t, real)
		link(t, x.to, filepath.Join(real, x.name))
		before := tree(t, other)
		_, err := run(2, "output.overwrite=true")
		expectFault(t, err, status.IO, []string{"output.dir: " + filepath.Join(out, x.name) + " is a symbolic link"})
		if !maps.Equal(tree(t, other), before) || len(entries(t, real)) != 1 {
			t.Errorf("%s: %v, %v", x.name, entries(t, other), entries(t, real))
		}
	}
	removeAll(t, real)
	mkdir(t, real)
	if _, err := run(2); err != nil || len(losses(t, dir)) != 6 {
		t.Errorf("output.dir is a link: %v", err)
	}
}

// A folder that has the name of a result file, or a file that has the name of a folder of results,
// is refused before the first step, also if it is empty and with output.overwrite.
func TestOtherKindsInOutputDir(t *testing.T) {
	dir, run := newKept(t, "output.overwrite=true", "output.trace=[1,2]", "output.tensorboard=true")
	out := filepath.Join(dir, "out")
	for _, name := range []string{"report.html", "trace.json", "metrics.jsonl", "model", "checkpoints", "tensorboard"} {
		removeAll(t, out)
		mkdir(t, out)
		kind := " is a folder"
		if path := filepath.Join(out, name); filepath.Ext(name) != "" {
			mkdir(t, path)
		} else {
			kind = " is a file"
			putIn(t, path, "")
		}
		_, err := run(2)
		expectFault(t, err, status.IO, []string{"output.dir: " + filepath.Join(out, name) + kind})
		if left := entries(t, out); len(left) != 1 {
			t.Errorf("%s: %v", name, left)
		}
	}
}

// If the model cannot be written at the end, the report is written and names the reason.
func TestReportWithoutModel(t *testing.T) {
	dir, run := newKept(t, "train.steps=400", "checkpoint.every=0")
	out := filepath.Join(dir, "out")
	done := inBackground(func() error { _, err := run(2); return err })
	for info, err := os.Stat(filepath.Join(out, "metrics.jsonl")); err != nil || info.Size() == 0; info,
		err = os.Stat(filepath.Join(out, "metrics.jsonl")) {
		time.Sleep(time.Millisecond)
	}
	putIn(t, filepath.Join(out, "model"), "")
	why := filepath.Join(out, "model") + " is a file"
	expectFault(t, <-done, status.IO, []string{why})
	if page, err := os.ReadFile(filepath.Join(out, "report.html")); err != nil || !strings.Contains(string(page), why) {
		t.Errorf("the report does not name the reason: %v", err)
	}
}

// If several jobs start together in one folder, one runs and the others are refused before they
// change anything. Jobs that start while it runs are refused as well. After the running job is
// killed, the same job resumes.
func TestJobsInOneFolder(t *testing.T) {
	dir, run := newKept(t)
	out, sets := filepath.Join(dir, "out"), "train.steps=40 checkpoint.every=1"
	if _, err := run(2, strings.Fields(sets)...); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	removeAll(t, out)
	const jobs = 3
	var all sync.WaitGroup
	codes, errs := make([]int, jobs), make([]bytes.Buffer, jobs)
	running, ended := make([]*exec.Cmd, jobs), make(chan int, jobs)
	for i := range jobs {
		// The job that runs waits in its fourth step until the others are refused, and is killed
		// then.
		running[i] = child(dir, "ULYSSES_TEST_SETS="+sets, "ULYSSES_FAULT=late:1:3")
		running[i].Stderr = &errs[i]
		if err := running[i].Start(); err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			running[i].Wait()
			codes[i] = running[i].ProcessState.ExitCode()
			ended <- i
		})
	}
	for range jobs - 1 {
		select {
		case i := <-ended:
			if codes[i] != int(status.IO) ||
				!strings.Contains(errs[i].String(), "output.dir: "+out+" is in use by the train job "+
					filepath.Join(dir, "job.toml")+" on ") {
				t.Errorf("exit %d: %s", codes[i], errs[i].String())
			}
		case <-time.After(time.Minute):
			t.Fatal("two jobs run in one folder")
		}
	}
	for range 6000 {
		lines, _ := os.ReadFile(filepath.Join(out, "metrics.jsonl"))
		if states, _ := filepath.Glob(filepath.Join(out, "checkpoints", "step-*")); len(states) == 1 &&
			bytes.Count(lines, []byte("\n")) == 2 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	for _, more := range [][]string{nil, {"kind=eval"}, {"output.overwrite=true", "checkpoint.resume=off"}} {
		// written in the background
		quiet := func(path, _ string) bool {
			return strings.Contains(path, "/.step-") || strings.Contains(path, "flight")
		}
		before := tree(t, out)
		_, err := run(2, append(strings.Fields(sets), more...)...)
		after := tree(t, out)
		maps.DeleteFunc(before, quiet)
		maps.DeleteFunc(after, quiet)
		expectFault(t, err, status.IO,
			[]string{"is in use by the train job ", "; choose another output.dir, or wait until that job has ended"})
		if !maps.Equal(after, before) {
			t.Errorf("%v: a refused job touched the folder", more)
		}
	}
	for _, cmd := range running {
		cmd.Process.Kill()
	}
	all.Wait()
	if _, err := run(2, strings.Fields(sets)...); err != nil || !slices.Equal(losses(t, dir), want) {
		t.Errorf("after a kill: %v, %v, want %v", err, losses(t, dir), want)
	}
}

// A job that is refused before it starts creates no folder, and writes nothing into an existing
// one.
func TestRefusedJobLeavesNoFolder(t *testing.T) {
	dir, run := newKept(t)
	out := filepath.Join(dir, "out")
	if _, err := run(2, "data.path=nowhere.txt"); err == nil {
		t.Fatal("it ran")
	}
	if _, err := os.Lstat(out); err == nil {
		t.Errorf("a folder with %v", entries(t, out))
	}
	putIn(t, filepath.Join(out, "notes.txt"), "mine")
	if _, err := run(2, "data.path=nowhere.txt"); err == nil || !slices.Equal(entries(t, out), []string{"notes.txt"}) {
		t.Errorf("%v: %v", err, entries(t, out))
	}
}

// If the output folder is removed or replaced, the run ends with an error that names it.
func TestFolderRemovedDuringARun(t *testing.T) {
	for _, x := range []struct {
		name, sets string
		spoil      func(out string) error
	}{
		{"removed", "", os.RemoveAll},
		{"removed, and made again by a checkpoint", "checkpoint.every=1", os.RemoveAll},
		{"moved", "", func(out string) error { return os.Rename(out, out+".moved") }},
		{"metrics removed", "", func(out string) error { return os.Remove(filepath.Join(out, "metrics.jsonl")) }},
		{"metrics replaced", "", func(out string) error {
			path := filepath.Join(out, "metrics.jsonl")
			data, err := os.ReadFile(path)
			if err == nil {
				err = os.Remove(path)
			}
			if err == nil {
				err = os.WriteFile(path, data, 0o666)
			}
			return err
		}},
	} {
		dir, _ := newKept(t)
		out := filepath.Join(dir, "out")
		cmd := child(dir, "ULYSSES_TEST_SETS=train.steps=30000 checkpoint.every=0 "+x.sets)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for range 6000 {
			if data, _ := os.ReadFile(filepath.Join(out, "metrics.jsonl")); bytes.Count(data, []byte("\n")) > 1 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		for range 1000 { // a checkpoint may still be written into it
			if err := x.spoil(out); err == nil {
				break
			}
		}
		cmd.Wait()
		// Among goroutine ranks, a peer that was ended may report first; it quotes the rank at
		// fault.
		if code := status.Code(cmd.ProcessState.ExitCode()); code != status.IO && code != status.Comm ||
			!strings.Contains(stderr.String(), out) ||
			!strings.Contains(stderr.String(), "removed or replaced") &&
				!strings.Contains(stderr.String(), "no such file") {
			t.Errorf("%s: %v: %s", x.name, code, stderr.String())
		}
	}
}

// spoiler is a log writer that calls a function when it reads a text.
type spoiler struct {
	at   string
	does func()
	once sync.Once
}

func (s *spoiler) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte(s.at)) {
		s.once.Do(s.does)
	}
	return len(line), nil
}

// A folder that is removed after the last step also ends the run with an error, although writing
// the model or a checkpoint would create the folder again.
func TestFolderRemovedAtTheEnd(t *testing.T) {
	for _, sets := range []string{"checkpoint.every=0", "checkpoint.every=6", "checkpoint.every=0 output.model=false",
		"checkpoint.every=0 output.trace=[1,2] output.model=false"} {
		dir, _ := newKept(t)
		out := filepath.Join(dir, "out")
		var stdout bytes.Buffer
		log := &spoiler{at: "train step=6 of=6", does: func() { removeAll(t, out) }}
		err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: strings.Fields(sets), Ranks: 2, Stdout: &stdout,
			Stderr: log})
		if code := status.Of(err); code != status.IO && code != status.Comm ||
			!strings.Contains(err.Error(),
				"output.dir: "+out+
					" was removed or replaced while the job ran, and results are lost with it; run the job again") {
			t.Errorf("%s: %v: %v", sets, code, err)
		}
		if _, err := os.Lstat(out); err == nil {
			t.Errorf("%s: the folder was made again, with %v", sets, entries(t, out))
		}
	}
}
