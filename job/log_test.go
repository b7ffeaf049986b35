package job

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ulysses/internal/status"
	"ulysses/internal/units"
)

// By default the log has lines for people. With --log json it has JSON objects, in which numbers
// are JSON numbers.
func TestLogForms(t *testing.T) {
	dir, _ := newKept(t)
	job := filepath.Join(dir, "job.toml")
	for _, form := range []string{"auto", "console"} {
		code, _, errs := call(job, "--ranks", "2", "--log", form, "--set", "eval.split=0.2", "--set",
			"output.dir="+t.TempDir())
		if code != status.OK || strings.ContainsAny(errs, "{\x1b") ||
			!strings.Contains(errs, " INF train step=1 of=6 loss=") ||
			!strings.Contains(errs, " INF eval step=6 eval_loss=") {
			t.Errorf("%s: %v\n%q", form, code, errs)
		}
	}
	code, _, errs := call("--log", "json", job, "--ranks", "2", "--set", "eval.split=0.2", "--set",
		"output.dir="+t.TempDir())
	seen := map[string]int{}
	for _, line := range strings.Split(strings.TrimSpace(errs), "\n") {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); code != status.OK || err != nil || m["rank"] != 0.0 ||
			m["host"] == "" {
			t.Fatalf("%v %v: %s", code, err, line)
		}
		message := m["message"].(string)
		seen[message]++
		for _, name := range map[string][]string{"train": {"step", "of", "loss", "grad_norm", "lr", "tokens_per_second",
			"seconds_left"}, "eval": {"step", "eval_loss", "perplexity", "eval_tokens"}}[message] {
			if _, ok := m[name].(float64); !ok {
				t.Errorf("%s is no number in %s", name, line)
			}
		}
	}
	if seen["train"] < 2 || seen["eval"] != 1 {
		t.Errorf("%v", seen)
	}
	code, _, errs = call(job, "--log", "json", "--set", "data.sequnce=3", "--set", "seed=-1")
	var last map[string]any
	if err := json.Unmarshal([]byte(errs), &last); err != nil || code != status.InvalidConfig ||
		last["level"] != "error" || last["exit_code"] != 2.0 || last["status"] != "invalid configuration" ||
		!strings.HasPrefix(last["message"].(string), "2 faults, ") || last["host"] == nil {
		t.Errorf("the last line of a job that is refused: %v %v: %s", code, err, errs)
	}
	if code, _, errs := call(job, "--log", "xml"); code != status.InvalidArgument ||
		!strings.Contains(errs, "--log xml: unknown form; use auto, console, json") {
		t.Errorf("%v %s", code, errs)
	}
}

// An error names rank and host once, in both forms. Ranks other than rank 0 write only errors.
func TestLogOfARank(t *testing.T) {
	for _, form := range []string{"console", "json"} {
		var out bytes.Buffer
		log := (&Options{log: form}).logger(&screen{to: &out}, 2, "node7")
		log.Info().Msg("device")
		log.Warn().Msg("slow")
		log.Error().Msg("step 3: gone")
		log.Error().Msg("rank 2 on node7: late")
		s := out.String()
		if strings.Count(s, "\n") != 2 || form == "console" &&
			(!strings.Contains(s, " ERR rank 2 on node7: step 3: gone\n") ||
				strings.Count(s, "rank 2 on node7") != 2) ||
			form == "json" && strings.Count(s, `"level":"error","rank":2,"host":"node7",`) != 2 {
			t.Errorf("%s: %s", form, s)
		}
	}
}

// JSON has no NaN and Inf: they are texts, as docs/job-file.md says.
func TestLogOfNaN(t *testing.T) {
	for form, want := range map[string]string{"console": "loss=NaN grad_norm=+Inf",
		"json": `"loss":"NaN","grad_norm":"+Inf"`} {
		var out bytes.Buffer
		log := (&Options{log: form}).logger(&screen{to: &out}, 0, "node7")
		log.Info().Float64("loss", math.NaN()).Float64("grad_norm", math.Inf(1)).Msg("train")
		if !strings.Contains(out.String(), want) {
			t.Errorf("%s: no %q in %s", form, want, out.String())
		}
	}
}

// By default a run prints a few lines, with --verbose every table, and with --quiet one line.
func TestVerboseAndQuiet(t *testing.T) {
	dir, _ := newKept(t)
	out := filepath.Join(dir, "out")
	fresh := func(more ...string) (status.Code, string, string) {
		if err := os.RemoveAll(out); err != nil {
			t.Fatal(err)
		}
		return call(append([]string{filepath.Join(dir, "job.toml"), "--ranks", "2", "--set", "eval.split=0.2"},
			more...)...)
	}
	tables := []string{"memory of rank 0", "all-reduces ", "at most on a rank"}
	code, few, _ := fresh()
	if n := strings.Count(few, "\n"); code != status.OK || n > 20 {
		t.Errorf("%v, %d lines:\n%s", code, n, few)
	}
	for _, x := range []string{"memory           ", " others ", "loss  ", "speed  ", "traffic          ",
		"equal to the formulas\n", "model  ", "report  "} {
		if !strings.Contains(few, x) {
			t.Errorf("no %q in\n%s", x, few)
		}
	}
	var flops, seconds float64
	for _, l := range readMetrics(t, filepath.Join(out, "metrics.jsonl")) {
		flops, seconds = flops+l.ModelTFLOPS*1e12*l.Seconds, seconds+l.Seconds
	}
	if want := fmt.Sprintf(" tokens/s, %s causal model FLOP/s a rank\n",
		units.Short(flops/seconds)); !strings.Contains(few, want) {
		t.Errorf("the speed of all steps is %q, not in\n%s", want, few)
	}
	_, all, _ := fresh("--verbose")
	for _, x := range tables {
		if strings.Contains(few, x) || !strings.Contains(all, x) {
			t.Errorf("%q is of --verbose alone\n%s\n%s", x, few, all)
		}
	}
	code, line, errs := fresh("-q")
	if code != status.OK || errs != "" || strings.Count(line, "\n") != 1 ||
		!strings.HasPrefix(line, "finished all 6 steps: loss ") ||
		!strings.Contains(line, "held-out loss ") || !strings.Contains(line, "model "+filepath.Join(out, "model")) {
		t.Errorf("%v\n%s%s", code, line, errs)
	}
	if code, line, errs = call(filepath.Join(dir, "job.toml"), "-q", "--set", "eval.split=0.2"); code != status.OK ||
		errs != "" || line != "nothing left to do: the checkpoint has 6 steps, and train.steps is 6\n" {
		t.Errorf("%v\n%s%s", code, line, errs)
	}
	if code, _, errs = fresh("-q", "-v"); code != status.InvalidArgument ||
		!strings.Contains(errs, "contradictory; remove one") {
		t.Errorf("%v %s", code, errs)
	}
}

// A progress bar is drawn only on a terminal, not on /dev/null, a file or a pipe, and not with
// --quiet or JSON.
func TestBar(t *testing.T) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	defer write.Close()
	for _, w := range []io.Writer{null, write, &bytes.Buffer{}} {
		if isTerminal(w) {
			t.Errorf("%v is no terminal", w)
		}
	}
	dir, _ := newKept(t)
	t.Setenv("TERM", "xterm")
	for args, want := range map[string]bool{"": true, "-q": false, "--log json": false} {
		master, terminal := openTerminal(t)
		if !isTerminal(terminal) {
			t.Error("a terminal is taken for none")
		}
		code := Main(append([]string{filepath.Join(dir, "job.toml"), "--set", "eval.split=0.2", "--set", "eval.every=2",
			"--set", "output.dir=" + t.TempDir()}, strings.Fields(args)...), io.Discard, terminal)
		terminal.Close()
		drawn, err := io.ReadAll(master)
		if code != status.OK || err != nil && !errors.Is(err, unix.EIO) ||
			strings.Contains(string(drawn), "(0/6)") != want {
			t.Errorf("%q: %v %v: %q", args, code, err, drawn)
		}
		for _, line := range strings.Split(string(drawn), "\n") { // a log line has no bar beside it
			if at := strings.Index(line, "INF"); at > 0 &&
				strings.Contains(line[strings.LastIndex(line[:at], "\r")+1:at], "|") {
				t.Errorf("%q: the bar is left before %q", args, line)
			}
		}
	}
}

// A narrow terminal has no bar, which would begin a line at each update. A terminal that TERM calls
// dumb has no colours either.
func TestNarrowAndDumbTerminals(t *testing.T) {
	_, terminal := openTerminal(t)
	defer terminal.Close()
	t.Setenv("TERM", "xterm")
	for columns, want := range map[uint16]bool{0: true, barWidth - 1: false, barWidth: true} {
		if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns}); err != nil {
			t.Fatal(err)
		}
		if hasBar(terminal) != want {
			t.Errorf("%d columns: a bar is %v", columns, !want)
		}
	}
	t.Setenv("TERM", "dumb")
	if isTerminal(terminal) || hasBar(terminal) {
		t.Error("a dumb terminal has colours or a bar")
	}
}

// openTerminal returns the two ends of a new terminal.
func openTerminal(t *testing.T) (master, terminal *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	return master, terminal
}
