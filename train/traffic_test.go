package train

import (
	"fmt"

	"ulysses/comm"
)

// checkTraffic compares the bytes in the ledger with the formulas. They must be equal for every
// operation except control messages.
func checkTraffic(l *comm.Ledger, formulas []Traffic) error {
	want := map[[2]string]int64{}
	for _, f := range formulas {
		want[[2]string{f.Axis, f.Op}] += f.Bytes
	}
	for _, e := range l.Entries() {
		at := [2]string{e.Axis, e.Op}
		if e.Control {
			continue
		}
		if n, ok := want[at]; !ok || n != e.Bytes {
			return fmt.Errorf("%s on axis %s: %d bytes sent, formula %d", e.Op, e.Axis, e.Bytes, n)
		}
		delete(want, at)
	}
	for at, n := range want {
		if n != 0 {
			return fmt.Errorf("%s on axis %s: nothing sent, formula %d", at[1], at[0], n)
		}
	}
	return nil
}
