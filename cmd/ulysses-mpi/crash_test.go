package main

import (
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// crashes are the crashes that no recover of this program catches.
var crashes = map[string]func(){
	"panic":    func() { go panic("a goroutine's own"); select {} },
	"fatal":    func() { new(sync.Mutex).Unlock() },
	"segv":     func() { syscall.Kill(os.Getpid(), syscall.SIGSEGV); select {} },
	"abort":    func() { syscall.Kill(os.Getpid(), syscall.SIGABRT); select {} },
	"overflow": func() { debug.SetMaxStack(1 << 20); os.Exit(overflow(0)) },
	"threads":  func() { syscall.Setuid(otherUser); limitTo(unix.RLIMIT_NPROC, 1); startThreads() },
	"memory":   func() { limitTo(unix.RLIMIT_AS, 1<<20); startThreads() },
}

// otherUser has no processes. The number of processes of root has no limit.
const otherUser = 1<<30 + 7

func limitTo(resource int, value uint64) {
	if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: value, Max: value}); err != nil {
		panic(err)
	}
}

func startThreads() {
	for range 100 {
		go func() { runtime.LockOSThread(); select {} }()
	}
	select {}
}

//lint:ignore SA5007 the recursion has to overflow the stack
func overflow(n int) int { return overflow(n+1) + 1 }

// After any crash the program prints the position or the reason, and exits with 10, because 2
// means that the job file is wrong.
func TestCrash(t *testing.T) {
	for kind := range crashes {
		reason, stacks := "the program crashed: please report the lines above", true
		switch kind {
		case "threads":
			stacks, reason = false, "the system allows no more threads or processes; raise the limit of this user (ulimit -u) or container (docker run --pids-limit)"
		case "memory":
			stacks, reason = false, "the system gives no more memory; raise the limit of the address space (ulimit -v), make the job smaller or use more ranks"
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "ULYSSES_TEST_AS_PROGRAM=1", "ULYSSES_TEST_CRASH="+kind)
		out, _ := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != 10 || stacks && !strings.Contains(string(out), "goroutine ") ||
			!strings.HasSuffix(string(out), ": "+reason+"\n") {
			t.Errorf("%s: exit %d (%v): %.2000s", kind, code, cmd.ProcessState, out)
		}
	}
	_, job := jobFolder(t)
	cmd := exec.Command(os.Args[0], job, "--ranks", "2")
	cmd.Env = append(os.Environ(), "ULYSSES_TEST_AS_PROGRAM=1", "ULYSSES_FAULT=crash:1:3")
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 10 ||
		!strings.Contains(string(out), "crash requested by ULYSSES_FAULT") {
		t.Errorf("in a step: exit %d (%v): %.2000s", code, cmd.ProcessState, out)
	}
}
