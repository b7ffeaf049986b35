package comm

import "time"

// suiteAlign gives every rank a clock that is off by a known time: what is measured must be that
// time, to within what it says.
func suiteAlign(c Comm) error {
	if c.Kind() == "host" {
		return nil // where all ranks take part in every SendRecv
	}
	start := time.Now()
	if err := c.Barrier(); err != nil {
		return err
	}
	// Ranks of one machine share the system's clock; Local ranks one process.
	off := time.Duration(c.Rank()) * 3 * time.Second
	a, err := Align(c, func() time.Duration { return time.Duration(time.Now().UnixNano()) - off })
	if err != nil {
		return err
	}
	if d := a.Offset - off; d > a.Within || -d > a.Within || a.Within > time.Since(start) {
		return wrong("clock is off by %v, measured %v within %v", off, a.Offset, a.Within)
	}
	if c.Rank() == 0 && a != (Alignment{}) {
		return wrong("the first rank is off itself by %v", a)
	}
	return nil
}
