package comm

import "time"

// suiteAlign gives every rank a clock with a known offset. Align must measure this offset within
// the error that it reports.
func suiteAlign(c Comm) error {
	if c.Kind() == "host" {
		return nil // all ranks must call SendRecv
	}
	start := time.Now()
	if err := c.Barrier(); err != nil {
		return err
	}
	// All ranks read the same system clock.
	off := time.Duration(c.Rank()) * 3 * time.Second
	a, err := Align(c, func() time.Duration { return time.Duration(time.Now().UnixNano()) - off })
	if err != nil {
		return err
	}
	if d := a.Offset - off; d > a.Within || -d > a.Within || a.Within > time.Since(start) {
		return wrong("the offset is %v, measured %v with an error of at most %v", off, a.Offset, a.Within)
	}
	if c.Rank() == 0 && a != (Alignment{}) {
		return wrong("rank 0 has an offset to itself: %v", a)
	}
	return nil
}
