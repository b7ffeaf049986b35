package supervise

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"ulysses/internal/flight"
	"ulysses/internal/status"
)

// A job that showed no sign of life starts again, also if its ranks remove their records while the
// launcher ends them: only a job that was refused has not left any.
func TestFrozenJobWithoutRecords(t *testing.T) {
	defer func(p time.Duration) { poll = p }(poll)
	poll = 20 * time.Millisecond
	dir := t.TempDir()
	r := flight.New(0, 1, "n0")
	if err := r.Attach(dir); err != nil {
		t.Fatal(err)
	}
	record := flight.File(dir, 0)
	first := `trap 'rm "$0"; exit 1' TERM; : > "$1"; while :; do sleep 0.01; done`
	launcher := []string{"sh", "-c", `[ "$` + Attempt + `" = 1 ] && [ "$2" = again ] && exit 0; ` + first}
	var log []string
	code, err := Run(Options{Launcher: launcher, Program: []string{record, filepath.Join(dir, "started")}, Records: dir,
		Restarts: 1, Again: func() (string, []string) { return "here", []string{"again"} },
		Timeout: 200 * time.Millisecond, Stdout: os.Stdout, Stderr: os.Stderr,
		Log: func(text string) { log = append(log, text) }})
	text := strings.Join(log, "\n")
	if code != 0 || err != nil || !strings.Contains(text, "restart 1 of 1 from here") ||
		strings.Count(text, "no rank has shown a sign of life for 200ms") != 2 {
		t.Errorf("exit %d, %v: %s", code, err, text)
	}
}

// A signal between two attempts ends the supervision: the next launcher, which has no handler yet
// when it gets a signal, is not started.
func TestSignalBetweenAttempts(t *testing.T) {
	dir := t.TempDir()
	if err := flight.New(0, 1, "n0").Attach(dir); err != nil {
		t.Fatal(err)
	}
	started := filepath.Join(dir, "started")
	signals := make(chan os.Signal, 8)
	launcher := []string{"sh", "-c", `[ "$` + Attempt + `" = 0 ] || { : > "$0"; sleep 5; }; touch -d '1 minute ago' "$1"; exit 5`}
	code, err := Run(Options{Launcher: launcher, Program: []string{started, flight.File(dir, 0)}, Records: dir,
		Restarts: 3,
		Again: func() (string, []string) {
			signals <- syscall.SIGUSR1
			return "here", nil
		},
		Stdout: os.Stdout, Stderr: os.Stderr, Log: func(string) {}, Signals: signals})
	if code != int(status.Preempted) || err != nil {
		t.Errorf("exit %d, %v", code, err)
	}
	if _, err := os.Stat(started); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the launcher was started again: %v", err)
	}
}

// A signal that comes before the first launcher, as while scontrol lists the nodes, ends the
// supervision as well, with the exit code with which a batch script queues the job again.
func TestSignalBeforeFirstAttempt(t *testing.T) {
	started := filepath.Join(t.TempDir(), "started")
	signals := make(chan os.Signal, 8)
	signals <- syscall.SIGTERM
	log := ""
	code, err := Run(Options{Launcher: []string{"sh", "-c", `: > "$0"; sleep 5`}, Program: []string{started},
		Records: t.TempDir(), Stdout: os.Stdout, Stderr: os.Stderr, Log: func(text string) { log += text },
		Signals: signals})
	if code != int(status.Preempted) || err != nil || !strings.Contains(log, "the job is not started;") {
		t.Errorf("exit %d, %v: %s", code, err, log)
	}
	if _, err := os.Stat(started); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the launcher was started: %v", err)
	}
}

// A launcher that ends well without a rank gets a warning. A run changes output.dir, which has the
// folder of the records, even if it leaves nothing there.
func TestLauncherWithoutRanks(t *testing.T) {
	for script, want := range map[string]bool{
		"true": true, `mkdir "$0"`: false,
	} {
		dir, log := filepath.Join(t.TempDir(), "out"), ""
		code, err := Run(Options{Launcher: []string{"sh", "-c", script}, Program: []string{dir},
			Records: filepath.Join(dir, "flight"), Stdout: os.Stdout, Stderr: os.Stderr,
			Log: func(text string) { log += text }})
		if code != 0 || err != nil || strings.Contains(log, dir+" has not changed, as seen from here: the job has not run") != want {
			t.Errorf("%s: exit %d, %v: %q", script, code, err, log)
		}
	}
	dir, log := t.TempDir(), ""
	change := []string{"sh", "-c", `sleep 0.02; : > "$0/x" && rm "$0/x"`}
	if _, err := Run(Options{Launcher: change, Program: []string{dir},
		Records: filepath.Join(dir, "flight"), Stdout: os.Stdout, Stderr: os.Stderr,
		Log: func(text string) { log += text }}); err != nil || log != "" {
		t.Errorf("a folder that has changed: %v: %q", err, log)
	}
}

// The clock of a file server may differ from that of this host: a record is of an attempt if the
// attempt has written it, whatever its time.
func TestClockOfFileServer(t *testing.T) {
	for name, x := range map[string]struct {
		launcher string
		want     bool // the job starts again
	}{
		"behind": {`touch -d '2 minutes ago' "$0"; exit 5`, true},
		"ahead":  {`touch -d 'now 2 minutes' "$0"; exit 5`, true},
		"a record of an earlier run from the future": {`exit 7`, false},
	} {
		dir := t.TempDir()
		r := flight.New(0, 1, "n0")
		if err := r.Attach(dir); err != nil {
			t.Fatal(err)
		}
		record := flight.File(dir, 0)
		ahead := time.Now().Add(time.Minute)
		if err := os.Chtimes(record, ahead, ahead); err != nil {
			t.Fatal(err)
		}
		log := ""
		_, err := Run(Options{Launcher: []string{"sh", "-c", x.launcher}, Program: []string{record}, Records: dir,
			Restarts: 1, Again: func() (string, []string) { return "here", nil }, Stdout: os.Stdout, Stderr: os.Stderr,
			Log: func(text string) { log += text }})
		if err != nil || strings.Contains(log, "restart 1 of 1") != x.want {
			t.Errorf("%s: %v: %q", name, err, log)
		}
	}
}
