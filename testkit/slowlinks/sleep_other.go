//go:build !linux

package slowlinks

import "time"

func sleep(d time.Duration) { time.Sleep(d) }
