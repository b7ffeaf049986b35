package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"ulysses/testkit/need"
)

// The command of README.md names suites that run.py has, each of which selects its own cases alone.
func TestSuitesOfReadme(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, command, _ := strings.Cut(string(text), "benchmarks/run.py ")
	command, _, _ = strings.Cut(command, "\n")
	const program = `
import sys, types, run
a = types.SimpleNamespace(threads=2, repeat=1, python="python3", isa=["avx2"])
for word in sys.argv[1:]:
    print(word, *(name for name, s in run.suites(a).items() if word in (name, s.name)))
`
	c := exec.Command(need.Tool(t, "python3", "install Python"),
		append([]string{"-c", program}, strings.Fields(command)...)...)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) < 10 {
		t.Fatalf("README.md has only the suites %q", lines)
	}
	for _, line := range lines {
		word, names, _ := strings.Cut(line, " ")
		if names == "" {
			t.Errorf("run.py has no suite %s", word)
		}
		for _, name := range strings.Fields(names) {
			if !strings.HasPrefix(name, word) {
				t.Errorf("the suite %s also runs %s", word, name)
			}
		}
	}
}

// No rounds are refused. They replaced the results of earlier runs by empty ones.
func TestRoundsOfScripts(t *testing.T) {
	python := need.Tool(t, "python3", "install Python")
	for _, args := range []string{"run.py gemm --rounds 0", "run.py gemm --repeat 0", "plan.py --rounds 0",
		"memory.py cost --rounds -1"} {
		out, err := exec.Command(python, strings.Fields(args)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "must be at least 1") {
			t.Errorf("%s: %v\n%s", args, err, out)
		}
	}
}
