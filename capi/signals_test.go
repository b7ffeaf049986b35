package main

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A host's handlers without SA_ONSTACK, which use 100 KB of stack, do not damage calls. After a
// call the thread's mask is the host's again. Unreadable memory and SIGTERM end the process as they
// do without this library, and a host's handler of a fault is called.
func TestSignals(t *testing.T) {
	exe := compile(t, "gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "testdata/signals.c", "-lpthread")
	for _, c := range []struct {
		mode   string
		code   int
		signal syscall.Signal
	}{{mode: "alarm"}, {mode: "mask"}, {mode: "default", signal: syscall.SIGSEGV}, {mode: "handled", code: 42},
		{mode: "kill", signal: syscall.SIGTERM}} {
		t.Run(c.mode, func(t *testing.T) {
			cmd := exec.Command(exe, c.mode)
			defer time.AfterFunc(2*time.Minute, func() { cmd.Process.Kill() }).Stop()
			out, _ := cmd.CombinedOutput()
			how := cmd.ProcessState.Sys().(syscall.WaitStatus)
			if c.signal != 0 && (!how.Signaled() || how.Signal() != c.signal) || c.signal == 0 &&
				how.ExitStatus() != c.code {
				t.Errorf("%v\n%s", cmd.ProcessState, out)
			}
			if strings.Contains(string(out), "goroutine ") {
				t.Errorf("a dump of goroutines:\n%s", out)
			}
		})
	}
}
