package job

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/flight"
	"ulysses/internal/status"
)

// The verb diagnose reads the folder of the records or the output folder, as text and as JSON, and
// prefers the diagnosis that was written while the ranks were late.
func TestDiagnoseVerb(t *testing.T) {
	out := t.TempDir()
	dir := filepath.Join(out, flightFolder)
	if err := flight.Prepare(dir); err != nil {
		t.Fatal(err)
	}
	all := flight.Group{Axis: "world", Stride: 1, Size: 8}
	var ranks []*flight.Recorder
	for i := range all.Size {
		r := flight.New(i, all.Size, "n1")
		if err := r.Attach(dir); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Close)
		ranks = append(ranks, r)
		if i != 6 {
			r.Begin("all-reduce", all, 3, 64, false, 0)
		}
	}
	if err := ranks[6].WriteStacks(); err != nil {
		t.Fatal(err)
	}
	for _, folder := range []string{out, dir} {
		code, stdout, stderr := call("diagnose", folder)
		for _, want := range []string{"0-5    n1    0      waiting",
			"rank 6 on host n1 is late; 7 ranks wait for it in all-reduce #3", "stacks of rank 6: " +
				flight.StackFile(dir, 6)} {
			if code != status.OK || !strings.Contains(stdout, want) {
				t.Errorf("exit %v, not %q:\n%s%s", code, want, stdout, stderr)
			}
		}
	}
	if _, err := flight.Decide(dir); err != nil {
		t.Fatal(err)
	}
	ranks[6].Begin("all-reduce", all, 3, 64, false, 0) // continued, when the launcher ends the job
	_, stdout, _ := call("diagnose", dir, "--json")
	var d flight.Diagnosis
	if err := json.Unmarshal([]byte(stdout), &d); err != nil || len(d.Culprits) != 1 || d.Culprits[0].Rank != 6 ||
		d.Culprits[0].Waiting != 7 {
		t.Errorf("%+v %v", d, err)
	}
	for _, path := range []string{"no-folder", filepath.Join(dir, "flight", "rank-00000.flight")} {
		if code, _, stderr := call("diagnose", path); code != status.IO ||
			!strings.Contains(stderr, "diagnose: there is no folder "+path) {
			t.Errorf("%v: %s", code, stderr)
		}
	}
	if code, _, stderr := call("diagnose", t.TempDir()); code != status.IO ||
		!strings.Contains(stderr, "which a run that ends without a fault removes; name the output.dir of a run") {
		t.Errorf("exit %v: %s", code, stderr)
	}
}

// Without a rank that is behind, culprits is an empty list in JSON.
func TestDiagnoseNoRank(t *testing.T) {
	dir := t.TempDir()
	all := flight.Group{Axis: "world", Stride: 1, Size: 2}
	for i := range all.Size {
		r := flight.New(i, all.Size, "n1")
		if err := r.Attach(dir); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(r.Close)
		r.Begin("all-reduce", all, 3, 64, false, 0)
	}
	if code, stdout, stderr := call("diagnose", dir, "--json"); code != status.OK ||
		!strings.Contains(stdout, "no rank is behind") || !strings.Contains(stdout, "\n  \"culprits\": [],\n") {
		t.Errorf("exit %v: %s%s", code, stdout, stderr)
	}
}

// If the process of goroutine ranks is killed, all ranks stop at once. The diagnosis says that the
// process has ended, and does not blame a rank or the network.
func TestDiagnoseKilledProcess(t *testing.T) {
	dir, _ := newKept(t)
	if text, err := child(dir, "ULYSSES_FAULT=kill:1:3").CombinedOutput(); err == nil {
		t.Fatalf("the run was not killed: %s", text)
	}
	code, stdout, stderr := call("diagnose", filepath.Join(dir, "out"))
	if code != status.OK || !strings.Contains(stdout, "the process of all ranks (pid ") ||
		!strings.Contains(stdout, "kernel's log") || strings.Contains(stdout, "network") ||
		strings.Contains(stdout, "is late") {
		t.Errorf("exit %v: %s%s", code, stdout, stderr)
	}
	// a program that reads the ranks to blame gets a list
	if _, stdout, _ := call("diagnose", filepath.Join(dir, "out"), "--json"); !strings.Contains(stdout,
		"\n  \"culprits\": [],\n") {
		t.Errorf("no list of culprits: %s", stdout)
	}
}

// A run that ends well leaves no records.
func TestFlightFolderIsRemoved(t *testing.T) {
	dir, run := newKept(t)
	if text, err := run(2); err != nil {
		t.Fatal(text, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "out", flightFolder)); !os.IsNotExist(err) {
		t.Error("the folder of the flight recorder remains:", err)
	}
}
