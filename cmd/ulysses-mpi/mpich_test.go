//go:build mpi

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"ulysses/testkit/need"
)

var mpich struct {
	sync.Once
	output string
	err    error
	path   string
}

// withMPICH returns the program that make builds for MPICH.
func withMPICH(t *testing.T) string {
	t.Helper()
	need.Tool(t, "mpicc.mpich", "run make deps-test")
	need.Tool(t, "mpiexec.mpich", "run make deps-test")
	mpich.Do(func() {
		mpich.path, mpich.err = filepath.Abs("../../build/mpi/ulysses-mpich")
		if mpich.err == nil {
			var out []byte
			out, mpich.err = exec.Command("make", "-s", "-C", "../..", "build", "MPICC=mpicc.mpich",
				"PROGRAM="+mpich.path).CombinedOutput()
			mpich.output = string(out)
		}
	})
	if mpich.err != nil {
		t.Fatalf("%v\n%s", mpich.err, mpich.output)
	}
	return mpich.path
}

// A program that is built for MPICH has the losses of the one for Open MPI, bit for bit. Each is
// refused under the launcher of the other, where every process would be rank 0 of 1.
func TestMPICH(t *testing.T) {
	built := withMPICH(t)
	if code, stdout, stderr := launch(t, nil, built, "doctor"); code != 0 || !strings.Contains(stdout, "MPICH") {
		t.Errorf("doctor: exit %d: %s%s", code, stdout, stderr)
	}
	here, there := t.TempDir(), t.TempDir()
	steps := []string{"train.steps=3", "parallel.ulysses=2"}
	if code, _, e := mpirun(t, "2", nil, small(here, steps...)...); code != 0 {
		t.Fatal(code, e)
	}
	if code, _, e := launch(t, nil,
		append([]string{"timeout", "-k", "5", "240", "mpiexec.mpich", "-n", "2", built},
			small(there, steps...)...)...); code != 0 {
		t.Fatal(code, e)
	}
	same(t, "MPICH", losses(t, there), losses(t, here), 0)
	for launcher, argv := range map[string][]string{
		"mpirun (Open MPI)": {"mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2", built},
		"mpiexec (MPICH)":   {"mpiexec.mpich", "-n", "2", program},
	} {
		code, _, stderr := launch(t, nil,
			append(append([]string{"timeout", "-k", "5", "240"}, argv...), small(t.TempDir(), steps...)...)...)
		want := "launch: " + launcher + " started 2 tasks, but MPI found 1 rank"
		if code != 1 || strings.Count(stderr, want) != 1 || strings.Contains(stderr, "step=") {
			t.Errorf("%v: exit %d, not one %q: %s", argv, code, want, stderr)
		}
	}
}

// The wrapper of an MPI library that is not there is named.
func TestBuildWithoutWrapper(t *testing.T) {
	out, err := exec.Command("make", "-s", "-C", "../..", "build", "MPICC=mpicc.absent",
		"PROGRAM=/dev/null").CombinedOutput()
	if err == nil || !strings.Contains(string(out),
		"mpi-build: mpicc.absent: no such program; set MPICC to the mpicc of an MPI library") {
		t.Errorf("%v: %s", err, out)
	}
}

// git refuses to read a checkout of another user, as in a container whose root builds mounted
// sources. make then builds a program that names no commit.
func TestBuildInCheckoutOfAnother(t *testing.T) {
	need.Tool(t, "git", "run apt-get install git")
	built := filepath.Join(t.TempDir(), "ulysses-mpi")
	cmd := exec.Command("make", "-s", "-C", "../..", "build", "PROGRAM="+built)
	cmd.Env = append(os.Environ(), "GIT_TEST_ASSUME_DIFFERENT_OWNER=1", "GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_CONFIG_SYSTEM=/dev/null")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	code, stdout, stderr := launch(t, nil, built, "version")
	if code != 0 || !strings.Contains(stdout, "commit not recorded") {
		t.Errorf("exit %d: %s%s", code, stdout, stderr)
	}
}

// Wrappers that are installed from sources name the folder of the library in two words, -Wl,-rpath
// -Wl,FOLDER. go build refuses the first one alone.
func TestFolderOfLibrary(t *testing.T) {
	mpicc := need.Tool(t, "mpicc.mpich", "run make deps-test")
	script, err := filepath.Abs("../../scripts/mpi-build.sh")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	for name, text := range map[string]string{
		"mpicc": "[ $1 != -show ] || exec echo gcc -L/opt/lib -Wl,-rpath -Wl,/opt/lib -Wl,--enable-new-dtags -lmpi\n" +
			"exec " + mpicc + ` "$@"`,
		"go": "exec pkg-config --libs ompi",
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	comm, err := filepath.Abs("../../comm")
	if err == nil {
		err = os.Symlink(comm, filepath.Join(folder, "comm"))
	}
	if err != nil {
		t.Fatal(err)
	}
	run := exec.Command(script, filepath.Join(folder, "mpicc"), filepath.Join(folder, "go"), "build", "-o", "program")
	run.Dir = folder
	if out, _ := run.CombinedOutput(); !strings.HasPrefix(string(out), "-L/opt/lib -Wl,-rpath,/opt/lib -lmpi") {
		t.Errorf("flags: %s", out)
	}
}

// make run runs the program that it has built, also under another name.
func TestMakeRun(t *testing.T) {
	out, err := exec.Command("make", "-s", "-n", "-C", "../..", "run", "PROGRAM=build/other").CombinedOutput()
	if err != nil || !strings.Contains(string(out), " -o build/other ") ||
		!strings.Contains(string(out), " build/other examples/hybrid.toml") {
		t.Errorf("%v: %s", err, out)
	}
}
