package job

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/tensor"
)

// whole checks that the folder of checkpoints has exactly the given complete checkpoints, with all
// bytes.
func whole(t *testing.T, what, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
		if code, _, errs := call("export", filepath.Join(dir, e.Name()),
			filepath.Join(t.TempDir(), "model")); code != status.OK {
			t.Errorf("%s: %s: %s", what, e.Name(), errs)
		}
	}
	if want != nil && !slices.Equal(names, want) {
		t.Errorf("%s: %v, want %v", what, names, want)
	}
}

// If a file cannot be written, the job ends with an error, and earlier checkpoints stay.
func TestDiskFull(t *testing.T) {
	dir, run := newKept(t)
	if _, err := run(2, "train.steps=8", "checkpoint.keep=9"); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	drop(t, dir, 6, 8)
	out, err := child(dir, "ULYSSES_TEST_SETS=train.steps=8", "ULYSSES_TEST_FILE_LIMIT=20000").CombinedOutput()
	if code := err.(*exec.ExitError).ExitCode(); code != int(status.IO) ||
		!strings.Contains(string(out), "rank-0000") || !strings.Contains(string(out), "file too large") {
		t.Errorf("exit %d: %s", code, out)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "out", "checkpoints", "step-*"))
	if len(left) != 2 || filepath.Base(left[1]) != "step-00000004" {
		t.Errorf("what was there: %v", left)
	}
	if _, err := run(2, "train.steps=8"); err != nil || !slices.Equal(losses(t, dir), want) {
		t.Errorf("with room again: %v, %v, want %v", err, losses(t, dir), want)
	}
	// A folder that is none.
	put(t, filepath.Join(dir, "file"), "")
	if _, err := run(2, "output.dir="+dir, "checkpoint.dir=file"); status.Of(err) != status.IO ||
		!strings.Contains(err.Error(), "file") {
		t.Errorf("a file for a folder: %v", err)
	}
}

// If the disk is full, the run warns and continues, and ends with an error when its last checkpoint
// cannot be written. The model is written if it has room. No partly written file remains.
func TestDiskReallyFull(t *testing.T) {
	dir, run := newKept(t, "train.steps=8", "checkpoint.keep=9", "output.overwrite=true")
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	states, folder := filepath.Join(dir, "out", "checkpoints"), filepath.Join(dir, "out", "model")
	drop(t, dir, 2, 4, 6, 8)
	model, err := os.ReadFile(filepath.Join(folder, "model.safetensors"))
	if err == nil {
		err = os.RemoveAll(folder)
	}
	if err != nil {
		t.Fatal(err)
	}
	mount := func(flags uintptr, options string) error {
		return syscall.Mount("tmpfs", states, "tmpfs", flags, options)
	}
	if err := mount(0, "size=550k"); err != nil {
		needsMounts(t, err)
	}
	defer syscall.Unmount(states, syscall.MNT_DETACH)
	_, err = run(2)
	if got, _ := os.ReadFile(filepath.Join(folder, "model.safetensors")); !bytes.Equal(got, model) ||
		!strings.Contains(err.Error(), "the trained weights are in "+folder) {
		t.Errorf("the model has %d bytes, want %d: %v", len(got), len(model), err)
	}
	if status.Of(err) != status.IO || !strings.Contains(err.Error(), "no space left on device") ||
		!strings.Contains(err.Error(), "checkpoint of step 8") ||
		!strings.Contains(err.Error(), "; run the job again to resume") || strings.Contains(err.Error(), "step 6") {
		t.Errorf("%v", err)
	}
	if got := losses(t, dir); !slices.Equal(got, want) {
		t.Errorf("the run did not continue: %v, want %v", got, want)
	}
	whole(t, "full", states, "step-00000002", "step-00000004")
	if err := mount(syscall.MS_REMOUNT, "size=8m"); err != nil {
		t.Fatal(err)
	}
	if _, err := run(2); err != nil || !slices.Equal(losses(t, dir), want) {
		t.Errorf("with room again: %v, %v, want %v", err, losses(t, dir), want)
	}
}

// If a run that fails on all ranks cannot write its report, the log has one line of it.
func TestNoRoomForReport(t *testing.T) {
	dir, _ := newKept(t)
	out := filepath.Join(dir, "small")
	if err := os.Mkdir(out, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", out, "tmpfs", 0, "size=192k"); err != nil {
		needsMounts(t, err)
	}
	defer syscall.Unmount(out, syscall.MNT_DETACH)
	code, _, errs := call(filepath.Join(dir, "job.toml"), "--ranks", "2", "--set", "output.dir="+out, "--set",
		"optimizer.lr=1e300", "--set", "checkpoint.every=0", "--set", "output.model=false")
	if code != status.Numeric || strings.Count(errs, "report.html: cannot be written") != 1 ||
		strings.Contains(errs, "rank 0: "+out) {
		t.Errorf("%v\n%s", code, errs)
	}
}

// A disk that is too small for the results is refused before the first step, with the bytes of the
// weights in the model's folder and in a checkpoint. What was there stays.
func TestRoomForResults(t *testing.T) {
	dir, run := newKept(t)
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	size := func(pattern string) (n int64) {
		found, _ := filepath.Glob(filepath.Join(dir, "out", pattern))
		for _, path := range found {
			if s, err := tensor.OpenSafetensors(path); err != nil {
				t.Fatal(err)
			} else {
				for _, e := range s.Entries() {
					n += e.Numel() * e.DType.Size()
				}
				s.Close()
			}
		}
		return n
	}
	weights, state := size("model/model.safetensors"), size("checkpoints/step-00000006/rank-*")
	small := filepath.Join(dir, "small")
	if err := os.Mkdir(small, 0o755); err != nil {
		t.Fatal(err)
	}
	mount := func(flags uintptr, bytes int64) error {
		return syscall.Mount("tmpfs", small, "tmpfs", flags, fmt.Sprintf("size=%d", bytes))
	}
	if err := mount(0, 1<<16); err != nil {
		needsMounts(t, err)
	}
	defer syscall.Unmount(small, syscall.MNT_DETACH)
	for _, c := range []struct {
		sets  []string
		state int64
	}{{[]string{"checkpoint.every=0"}, 0}, {[]string{"checkpoint.every=2"}, state},
		{[]string{"checkpoint.every=0", "checkpoint.best=true", "eval.split=0.3", "eval.every=2"}, state}} {
		if err := mount(syscall.MS_REMOUNT, (weights+c.state)/4096*4096-8192); err != nil {
			t.Fatal(err)
		}
		_, err := run(2, append(c.sets, "output.dir="+small)...)
		want := fmt.Sprintf("the run writes at least %s there (weights of the model %s, a checkpoint %s)",
			units.Bytes(weights+c.state), units.Bytes(weights), units.Bytes(c.state))
		if left, _ := os.ReadDir(small); status.Of(err) != status.IO || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), small+" has ") || len(left) > 0 {
			t.Errorf("%v: %v, want %q; %v", c.sets, err, want, left)
		}
		if err := mount(syscall.MS_REMOUNT, 8<<20); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := run(2, "output.dir="+small); err != nil {
		t.Error(err)
	}
}

// A folder that cannot be written is refused before the first step. If it becomes unwritable during
// the run, the run warns and continues, and writes checkpoints again once it can.
func TestReadOnly(t *testing.T) {
	dir, run := newKept(t, "train.steps=8", "checkpoint.keep=9")
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	drop(t, dir, 6, 8)
	out := filepath.Join(dir, "out")
	states, metrics := filepath.Join(out, "checkpoints"), filepath.Join(out, "metrics.jsonl")
	env := []string{"ULYSSES_TEST_SETS=train.steps=8 checkpoint.keep=9"}
	if os.Getuid() == 0 { // who may write anywhere: somebody else runs the job
		env = append(env, "ULYSSES_TEST_UID=65534")
		if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
			t.Fatal(err)
		}
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err == nil {
				err = os.Chown(path, 65534, 65534)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, folder := range []string{states, out} {
		if err := os.Chmod(folder, 0o555); err != nil {
			t.Fatal(err)
		}
		text, err := child(dir, env...).CombinedOutput()
		if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != int(status.IO) ||
			!strings.Contains(string(text), "permission denied") || !strings.Contains(string(text), folder) {
			t.Errorf("%s: %v: %s", folder, err, text)
		}
		if err := os.Chmod(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		whole(t, folder, states, "step-00000002", "step-00000004")
		if !slices.Equal(losses(t, dir), want) {
			t.Errorf("%s: metrics.jsonl has changed: %v", folder, losses(t, dir))
		}
	}
	if text, err := child(dir, env...).CombinedOutput(); err != nil || !slices.Equal(losses(t, dir), want) {
		t.Errorf("when it can be written again: %v, %s: %v, want %v", err, text, losses(t, dir), want)
	}

	cmd := child(dir, append(env,
		"ULYSSES_TEST_SETS=train.steps=1000000 checkpoint.every=1 checkpoint.keep=2 checkpoint.accept=train.steps")...)
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(3*time.Minute, func() { cmd.Process.Kill() })
	defer timer.Stop()
	steps := func() int {
		data, _ := os.ReadFile(metrics)
		return bytes.Count(data, []byte("\n"))
	}
	until := func(enough func() bool) {
		for range 10000 {
			if enough() {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
	newest := func() string {
		found, _ := filepath.Glob(filepath.Join(states, "step-*"))
		if len(found) == 0 {
			return ""
		}
		return slices.Max(found)
	}
	until(func() bool { return steps() > 11 })
	if err := os.Chmod(states, 0o555); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond) // a checkpoint may have been under way
	then, last := steps(), newest()
	until(func() bool { return steps() > then+5 })
	if newest() != last {
		t.Errorf("a folder that cannot be written has got %s after %s", newest(), last)
	}
	if err := os.Chmod(states, 0o755); err != nil {
		t.Fatal(err)
	}
	until(func() bool { return newest() > last })
	if err := cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != int(status.Preempted) || newest() <= last {
		t.Errorf("%v, newest %s after %s: %s", err, newest(), last, text.String())
	}
	if !strings.Contains(text.String(), "permission denied") ||
		!strings.Contains(text.String(), "the next checkpoint is the next attempt") {
		t.Errorf("no warning: %s", text.String())
	}
	for line := range strings.Lines(text.String()) {
		if strings.Contains(line, "the run continues") &&
			(strings.Contains(line, "run the job again") || strings.Contains(line, "choose")) {
			t.Errorf("the run continues, and the warning says how to run it again: %s", line)
		}
	}
	whole(t, "on the way", states)
}
