package outdir

import (
	"bufio"
	"crypto/rand"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ulysses/internal/status"
)

func TestMain(m *testing.M) {
	settle = 50 * time.Millisecond // a refusal waits this long
	os.Exit(m.Run())
}

// quiet returns a wait function that fails the test when Take waits for a renewal.
func quiet(t *testing.T) func(string) {
	return func(text string) { t.Errorf("waited: %s", text) }
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// left lists the names in a folder.
func left(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// leave writes a record into a folder, as a killed process leaves it.
func leave(t *testing.T, dir string, edit func(r *Record)) *Record {
	t.Helper()
	r := Self("train", "job.toml")
	edit(&r)
	must(t, os.WriteFile(filepath.Join(dir, ownerFile), r.bytes(), 0o666))
	return &r
}

// killed runs a process that owns a folder, kills it, and returns its record.
func killed(t *testing.T, dir string) *Record {
	t.Helper()
	kill, r := owning(t, dir)
	kill()
	return r
}

// owning starts a process that owns a folder until the test kills it.
func owning(t *testing.T, dir string) (kill func(), r *Record) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestChild$")
	cmd.Env = append(os.Environ(), "OUTDIR_TEST_DIR="+dir)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "owner\n" {
		t.Fatalf("%q %v", line, err)
	}
	text, err := os.ReadFile(filepath.Join(dir, ownerFile))
	must(t, err)
	r = new(Record)
	must(t, json.Unmarshal(text, r))
	return func() { cmd.Process.Kill(); cmd.Wait() }, r
}

// TestChild is the child process of other tests.
func TestChild(t *testing.T) {
	dir := os.Getenv("OUTDIR_TEST_DIR")
	if dir == "" {
		t.Skip("for other tests to run")
	}
	o, err := Take(dir, Self("train", "child.toml"), func(string) {})
	if err != nil {
		os.Stdout.WriteString(err.Error() + "\n")
		os.Exit(1)
	}
	must(t, o.Identify("run of the child"))
	os.Stdout.WriteString("owner\n")
	select {}
}

func withoutLocks(t *testing.T) {
	lockFile = func(*os.File) (bool, error) { return false, syscall.ENOSYS }
	t.Cleanup(func() { lockFile = flock })
}

// Other processes are refused with the owner's name until the owner releases the folder or is
// killed. The next owner gets the record of the unfinished run.
func TestTake(t *testing.T) {
	for _, locks := range []bool{true, false} {
		if !locks {
			withoutLocks(t)
		}
		dir := filepath.Join(t.TempDir(), "a", "out")
		kill, r := owning(t, dir)
		for range 2 {
			_, err := Take(dir, Self("train", "job.toml"), quiet(t))
			if status.Of(err) != status.IO ||
				!strings.HasPrefix(err.Error(), "output.dir: "+dir+" is in use by the train job child.toml on "+r.Host+
					" (process ") ||
				!strings.HasSuffix(err.Error(), " UTC); choose another output.dir, or wait until that job has ended") {
				t.Fatalf("locks %v: %v", locks, err)
			}
		}
		kill()
		o, err := Take(dir, Self("train", "job.toml"), quiet(t))
		if err != nil || o.Before == nil || o.Before.Token != r.Token || o.Before.Run != "run of the child" {
			t.Fatalf("locks %v, after a kill: %v, %+v", locks, err, o)
		}
		if names := left(t, dir); !slices.Equal(names, []string{ownerFile}) || o.Held() != nil {
			t.Errorf("locks %v: %v, %v", locks, names, o.Held())
		}
		must(t, o.Undo()) // restored: the next owner gets the unfinished run's record
		for _, finished := range []bool{false, true} {
			o, err = Take(dir, Self("train", "job.toml"), quiet(t))
			if err != nil || o.Before == nil || o.Before.Run != "run of the child" {
				t.Fatalf("locks %v: %v, %+v", locks, err, o)
			}
			must(t, o.Release(finished))
		}
		if names := left(t, dir); len(names) > 0 {
			t.Errorf("locks %v: after a finished run there are %v", locks, names)
		}
	}
}

// A zombie process is no owner, and a process that was killed a moment ago is one only briefly.
func TestEndedOwner(t *testing.T) {
	defer func(was time.Duration) { settle = was }(settle)
	settle = time.Minute
	for _, locks := range []bool{true, false} {
		if !locks {
			withoutLocks(t)
		}
		for range 10 {
			dir := t.TempDir()
			cmd := exec.Command(os.Args[0], "-test.run=^TestChild$")
			cmd.Env = append(os.Environ(), "OUTDIR_TEST_DIR="+dir)
			out, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			if line, err := bufio.NewReader(out).ReadString('\n'); line != "owner\n" {
				t.Fatalf("%q %v", line, err)
			}
			must(t, cmd.Process.Kill())
			// the child is not yet waited for
			o, err := Take(dir, Self("train", "job.toml"), quiet(t))
			if err != nil {
				t.Fatalf("locks %v: %v", locks, err)
			}
			cmd.Wait()
			must(t, o.Release(true))
		}
	}
}

// Undo removes a folder that Take created, unless the folder has files.
func TestUndo(t *testing.T) {
	dir := t.TempDir()
	for _, x := range []struct{ out, stays string }{{"a/b/c", ""}, {"d/e", "d/note"}} {
		o, err := Take(filepath.Join(dir, x.out), Self("train", "job.toml"), quiet(t))
		must(t, err)
		if x.stays != "" {
			must(t, os.WriteFile(filepath.Join(dir, x.stays), nil, 0o666))
		}
		must(t, o.Undo())
	}
	if names := left(t, dir); !slices.Equal(names, []string{"d"}) ||
		!slices.Equal(left(t, filepath.Join(dir, "d")), []string{"note"}) {
		t.Errorf("%v", names)
	}
}

// If many processes call Take at the same time, exactly one succeeds, whether the folder is new,
// released, or its owner was killed.
func TestOneWins(t *testing.T) {
	dead := killed(t, t.TempDir())
	for _, locks := range []bool{true, false} {
		if !locks {
			withoutLocks(t)
		}
		for round := range 15 {
			dir := t.TempDir()
			switch round % 3 {
			case 1:
				leave(t, dir, func(r *Record) { *r = *dead; r.Token = rand.Text() })
			case 2:
				leave(t, dir, func(r *Record) { r.Ended = true })
			}
			const n = 8
			var all sync.WaitGroup
			owners, errs := make([]*Owner, n), make([]error, n)
			start := make(chan struct{})
			for i := range n {
				all.Go(func() {
					<-start
					owners[i], errs[i] = Take(dir, Self("train", "job.toml"), quiet(t))
				})
			}
			close(start)
			all.Wait()
			holders := 0
			for i, o := range owners {
				if o != nil && o.Held() == nil {
					holders++
					defer o.Release(true)
				} else if o != nil && locks {
					t.Errorf("round %d: two owners", round)
				} else if o == nil && !strings.Contains(errs[i].Error(), "is in use") {
					t.Errorf("locks %v, round %d: %v", locks, round, errs[i])
				}
			}
			if holders != 1 {
				t.Errorf("locks %v, round %d: %d owners: %v", locks, round, holders, errs)
			}
		}
	}
}

// An owner on another host is alive while it renews its file and dead otherwise. A requeued Slurm
// job does not wait for a renewal.
func TestOtherHost(t *testing.T) {
	defer func(b, p time.Duration) { beat, patience = b, p }(beat, patience)
	beat, patience = 20*time.Millisecond, 600*time.Millisecond
	elsewhere := func(r *Record) { r.Boot, r.Host, r.SlurmJob = "another", "node7", "17" }
	for _, locks := range []bool{true, false} {
		if !locks {
			withoutLocks(t)
		}
		dir := t.TempDir()
		leave(t, dir, elsewhere)
		waited := ""
		o, err := Take(dir, Self("train", "job.toml"), func(text string) { waited = text })
		if err != nil || !strings.Contains(waited, "train job job.toml on node7 (process ") ||
			!strings.Contains(waited, "Slurm job 17") {
			t.Fatalf("locks %v, silent: %v, %q", locks, err, waited)
		}
		must(t, o.Release(true))

		// A live owner renews the file in the background; its lock is not visible on another host.
		seen := lockFile
		lockFile = func(*os.File) (bool, error) { return true, nil }
		self := Self("train", "job.toml")
		elsewhere(&self)
		o, err = Take(dir, self, quiet(t))
		must(t, err)
		_, err = Take(dir, Self("train", "other.toml"), func(string) {})
		if status.Of(err) != status.IO ||
			!strings.Contains(err.Error(), "is in use by the train job job.toml on node7 (process ") {
			t.Errorf("locks %v, renewed: %v", locks, err)
		}
		// The owner's requeued Slurm job takes over, and the former owner learns it from Held.
		again := Self("train", "job.toml")
		again.SlurmJob, again.Restarts = "17", 1
		o2, err := Take(dir, again, quiet(t))
		must(t, err)
		if err := o.Held(); status.Of(err) != status.IO ||
			!strings.Contains(err.Error(), "was taken over by the train job job.toml on "+again.Host) {
			t.Errorf("locks %v: the former owner: %v", locks, err)
		}
		if o.Release(true) == nil || o2.Held() != nil {
			t.Errorf("locks %v: the former owner took the folder away", locks)
		}
		must(t, o2.Release(true))
		lockFile = seen
	}
	lockFile = flock
	// The lock of a dead node may still be held.
	dir := t.TempDir()
	leave(t, dir, elsewhere)
	f, err := os.Open(filepath.Join(dir, ownerFile))
	must(t, err)
	defer f.Close()
	if ok, err := flock(f); !ok {
		t.Fatal(err)
	}
	again := Self("train", "job.toml")
	if _, err := Take(dir, again, quiet(t)); err == nil || !strings.Contains(err.Error(), "on node7") {
		t.Errorf("locked: %v", err)
	}
	again.SlurmJob, again.Restarts = "17", 1
	o, err := Take(dir, again, quiet(t))
	must(t, err)
	must(t, o.Release(true))
}

// A process ID that was reused is no owner. Process IDs of a container are not IDs of this host. A
// file without a valid record is refused if its age is unknown.
func TestRecords(t *testing.T) {
	self := Self("train", "job.toml")
	for _, x := range []struct {
		name string
		edit func(r *Record)
		want life
	}{
		{"this process", func(*Record) {}, alive},
		{"a later process of the same number", func(r *Record) { r.Started = "1" }, dead},
		{"no such process", func(r *Record) { r.PID = 1 << 30 }, dead},
		{"another boot", func(r *Record) { r.Boot = "x" }, unknown},
		{"another container", func(r *Record) { r.Namespace = "pid:[1]" }, unknown},
		{"a system without /proc", func(r *Record) { r.Boot, r.Started = "", "" }, unknown},
	} {
		r := self
		if x.edit(&r); r.seen(&self) != x.want {
			t.Errorf("%s: %v", x.name, r.seen(&self))
		}
	}
	for _, garbage := range []string{"", "{", "[]", "{}"} {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, ownerFile), []byte(garbage), 0o666))
		o, err := Take(dir, self, quiet(t))
		if err != nil || o.Before != nil {
			t.Fatalf("%q: %v", garbage, err)
		}
		must(t, o.Release(true))
	}
	dir := t.TempDir()
	must(t, os.Symlink(filepath.Join(dir, "x"), filepath.Join(dir, ownerFile)))
	if _, err := Take(dir, self, quiet(t)); err == nil || !strings.Contains(err.Error(), "is a symbolic link") {
		t.Error(err)
	}
}

// If the owner's folder is removed or replaced, Held returns an error, and a link that replaces the
// folder is not followed.
func TestCheck(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "out")
	real := filepath.Join(root, "real")
	must(t, os.Mkdir(real, 0o777))
	must(t, os.Symlink("real", dir)) // the folder may be a link
	o, err := Take(dir, Self("train", "job.toml"), quiet(t))
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(dir, "a"), 0o777))
	must(t, os.Symlink("/elsewhere", filepath.Join(dir, "link")))
	must(t, os.Symlink("..", filepath.Join(dir, "a", "up")))
	must(t, o.Check("none", "a", "a/b/c", "a/none"))
	for name, at := range map[string]string{"link": "link", "link/x": "link", "a/up": "a/up", "a/up/x": "a/up"} {
		err := o.Check("none", name)
		if status.Of(err) != status.IO ||
			!strings.Contains(err.Error(), "output.dir: "+filepath.Join(dir, at)+" is a symbolic link to ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, change := range []func() error{func() error { return os.RemoveAll(real) },
		func() error { return os.Mkdir(real, 0o777) }} {
		must(t, change())
		if err := o.Check(); status.Of(err) != status.IO ||
			!strings.Contains(err.Error(), dir+" was removed or replaced while the job ran") {
			t.Error(err)
		}
	}
	if err := o.Release(true); err == nil {
		t.Error("Release returned no error for a folder that was removed")
	}
}

// Found skips empty files and empty folders.
func TestFound(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"full", "empty", "dir/x"} {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o777))
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(strings.TrimPrefix(name, "empty")), 0o666))
	}
	must(t, os.Mkdir(filepath.Join(dir, "void"), 0o777))
	if found, err := Found(dir, "full", "empty", "dir", "void", "none"); err != nil ||
		!slices.Equal(found, []string{"full", "dir/"}) {
		t.Errorf("%v %v", found, err)
	}
}

// Abandon restores the folder to its state before Take, and leaves another owner's file alone.
func TestAbandon(t *testing.T) {
	dir := t.TempDir()
	self := leave(t, dir, func(*Record) {})
	path := filepath.Join(dir, ownerFile)
	for _, name := range []string{path + "." + self.Token, path + ".stale." + self.Token} {
		must(t, os.WriteFile(name, nil, 0o666))
	}
	Abandon(dir, Self("eval", "job.toml"))
	if names := left(t, dir); len(names) != 3 {
		t.Errorf("another process abandons, and %v are left", names)
	}
	if Abandon(dir, *self); len(left(t, dir)) > 0 {
		t.Errorf("left: %v", left(t, dir))
	}
}
