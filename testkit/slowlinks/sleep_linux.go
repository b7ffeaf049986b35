package slowlinks

import (
	"syscall"
	"time"
)

// sleep blocks the thread for at most d. time.Sleep would round up to whole milliseconds if all
// goroutines are idle.
func sleep(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil) // a signal ends it early
}
