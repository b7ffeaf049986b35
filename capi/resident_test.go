package main

import (
	"os"
	"syscall"
)

// maxResident returns the largest resident memory of a process that has ended, in KiB.
func maxResident(s *os.ProcessState) int64 { return s.SysUsage().(*syscall.Rusage).Maxrss }
