package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// make installs packages only for root. For other users it prints the missing packages and the
// command, and make deps installs them. The test machine has no gcc, pkg-config or MPI; its id,
// sudo and apt-get record their arguments.
func TestMissingPackages(t *testing.T) {
	const missing = "gcc libc6-dev pkg-config openmpi-bin libopenmpi-dev"
	for _, c := range []struct {
		args, user, without string
		code                int
		says, runs          string
	}{
		{"build", "1000", "", 1, "missing: " + missing +
			"; run `make deps` (which runs: sudo apt-get install --no-install-recommends " + missing +
			"), then run make again", ""},
		{"build", "1000", "sudo", 1, "run `make deps`", ""},
		{"test", "1000", "", 0, "run `make deps-test`", ""},
		{"build install", "1000", "", 0, "installing " + missing,
			"sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends " + missing},
		{"build install", "1000", "sudo", 1,
			"there is no sudo; as root, run: apt-get install --no-install-recommends " + missing, ""},
		{"build", "0", "sudo", 0, "installing " + missing, "apt-get install -y -qq --no-install-recommends " + missing},
		{"build", "1000", "apt-get", 1, "this system's package manager", ""},
	} {
		t.Run(c.args+" as "+c.user+" without "+c.without, func(t *testing.T) {
			bin, did := t.TempDir(), filepath.Join(t.TempDir(), "did")
			for _, tool := range []string{"bash", "env", "awk", "sed", "sort", "head", "mktemp", "rm", "cat", "go"} {
				path, err := exec.LookPath(tool)
				if err == nil {
					err = os.Symlink(path, filepath.Join(bin, tool))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			for tool, does := range map[string]string{"id": "echo " + c.user, "sudo": `echo "sudo $*" >> ` + did,
				"apt-get": `echo "apt-get $*" >> ` + did} {
				if tool == c.without {
					continue
				}
				if err := os.WriteFile(filepath.Join(bin, tool), []byte("#!/bin/sh\n"+does+"\n"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			run := exec.Command(filepath.Join(bin, "bash"),
				append([]string{"scripts/deps.sh"}, strings.Fields(c.args)...)...)
			run.Dir, run.Env = "../..", []string{"PATH=" + bin, "HOME=" + os.Getenv("HOME"), "TMPDIR=" + t.TempDir()}
			out, _ := run.CombinedOutput()
			ran, _ := os.ReadFile(did)
			if code := run.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.says) ||
				strings.TrimSpace(string(ran)) != c.runs {
				t.Errorf("exit %d, it ran %q and said\n%s", code, ran, out)
			}
		})
	}
}

// The Go command of make GO=... need not be on PATH.
func TestDepsOfAnotherGo(t *testing.T) {
	program, err := exec.LookPath("go")
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	for _, tool := range []string{"bash", "awk", "sed", "sort", "head", "gcc", "pkg-config"} {
		path, err := exec.LookPath(tool)
		if err == nil {
			err = os.Symlink(path, filepath.Join(bin, tool))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	run := exec.Command(filepath.Join(bin, "bash"), "scripts/deps.sh", "build")
	run.Dir = "../.."
	run.Env = []string{"PATH=" + bin, "HOME=" + os.Getenv("HOME"), "GO=" + program, "MPICC=mpicc.mpich"}
	if out, err := run.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
