// Package proc reads what Linux reports about this machine and its processes in /proc and
// /sys/fs/cgroup. On other systems every function returns 0, or nothing.
package proc

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// procBytes returns the value of the line "name 12 kB" of a file, in bytes; 0 if there is no such
// line.
func procBytes(path, name string) int64 {
	kib, _ := strconv.ParseInt(strings.TrimSuffix(line(path, name), " kB"), 10, 64)
	return kib << 10
}

// WaitedForCore returns the seconds, summed over the threads of this process, in which a thread was
// ready to run and had no core; 0 = unknown.
func WaitedForCore() (seconds float64) {
	files, _ := filepath.Glob("/proc/self/task/*/schedstat")
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // the thread has ended
		}
		// the fields are nanoseconds on a core, nanoseconds of waiting for one, and time slices
		if f := strings.Fields(string(text)); len(f) > 1 {
			ns, _ := strconv.ParseFloat(f[1], 64)
			seconds += ns * 1e-9
		}
	}
	return seconds
}

// ResidentPeak returns the peak of this process's resident memory in bytes; 0 = unknown.
func ResidentPeak() int64 { return procBytes("/proc/self/status", "VmHWM:") }

// Stat returns the fields of /proc/<pid>/stat from the state on (field 3 of proc(5)); nil if there
// is no such process, or no /proc.
func Stat(pid int) []string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	// the process name before it may have any characters
	return strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
}
