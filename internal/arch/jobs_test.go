package arch

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// make cuda starts one compiler per core, but at most one per 3 GiB of free memory.
func TestJobs(t *testing.T) {
	dir := t.TempDir()
	cores := filepath.Join(dir, "nproc")
	if err := os.WriteFile(cores, []byte("#!/bin/sh\necho 8\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ meminfo, jobs string }{
		{"MemTotal:       99999999 kB\nMemAvailable:   99999999 kB\n", "8"},
		{"MemTotal:       99999999 kB\nMemFree: 1 kB\nMemAvailable:   12582912 kB\n", "4"}, // 12 GiB
		{"MemAvailable:   12582911 kB\n", "3"},
		{"MemAvailable:   25165824 kB\n", "8"}, // 24 GiB
		{"MemAvailable:   1000 kB\n", "1"},
		{"MemAvailable:   0 kB\n", "1"},
		{"MemTotal:       1000 kB\n", "8"}, // before Linux 3.14
		{"", "8"},
	} {
		meminfo := filepath.Join(dir, "meminfo")
		if err := os.WriteFile(meminfo, []byte(c.meminfo), 0o600); err != nil {
			t.Fatal(err)
		}
		run := exec.Command("../../scripts/jobs.sh", meminfo)
		run.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		if out, err := run.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != c.jobs {
			t.Errorf("%q: %s, %v; want %s", c.meminfo, out, err, c.jobs)
		}
	}
	text, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "-j$(shell scripts/jobs.sh)") {
		t.Error("the Makefile builds the plug-in without the jobs of scripts/jobs.sh")
	}
}
