package cpu

import (
	"strings"
	"syscall"
	"testing"

	"ulysses/internal/status"
)

// If the address space of the process is limited, the error of an allocation names the limit.
func TestAllocNamesTheLimit(t *testing.T) {
	d, err := New(Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_AS, &limit); err != nil {
		t.Fatal(err)
	}
	lower := limit
	lower.Cur = min(limit.Max, 1<<47)
	for _, x := range []struct {
		limit syscall.Rlimit
		says  string
	}{{limit, ""}, {lower, "limited to 131072.0 GiB: raise the limit (ulimit -v"}} {
		if err := syscall.Setrlimit(syscall.RLIMIT_AS, &x.limit); err != nil {
			t.Fatal(err)
		}
		_, err := d.Alloc(1 << 50)
		if status.Of(err) != status.OutOfMemory || !strings.Contains(err.Error(), x.says) ||
			strings.Contains(err.Error(), "ulimit") != (x.limit.Cur == lower.Cur) {
			t.Errorf("limit %v: %v", x.limit, err)
		}
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_AS, &limit); err != nil {
		t.Error(err)
	}
}
