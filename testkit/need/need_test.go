package need

import (
	"fmt"
	"runtime"
	"testing"
)

// recorder records how the test under test ended.
type recorder struct {
	testing.TB
	said string
}

func (r *recorder) Helper() {}
func (r *recorder) Fatalf(format string, args ...any) {
	r.said = "failed: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}
func (r *recorder) Skipf(format string, args ...any) {
	r.said = "skipped: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestNeed(t *testing.T) {
	dir := t.TempDir()
	for _, x := range []struct {
		ci   string
		f    func(t testing.TB)
		want string
	}{
		{"true", func(t testing.TB) { Tool(t, "go", "install Go"); File(t, dir, "mkdir") }, ""},
		{"", func(t testing.TB) { Tool(t, "no-such-tool", "install it") },
			"skipped: SKIPPED: no no-such-tool on PATH: install it"},
		{"true", func(t testing.TB) { Tool(t, "no-such-tool", "install it") },
			"failed: no no-such-tool on PATH, and CI=true: install it"},
		{"", func(t testing.TB) { File(t, "/no/file", "make file") },
			"skipped: SKIPPED: stat /no/file: no such file or directory: make file"},
		{"true", func(t testing.TB) { File(t, "/no/file", "make file") },
			"failed: stat /no/file: no such file or directory, and CI=true: make file"},
	} {
		t.Setenv("CI", x.ci)
		r, done := &recorder{}, make(chan bool)
		go func() { defer close(done); x.f(r) }()
		<-done
		if r.said != x.want {
			t.Errorf("CI=%q: %q, want %q", x.ci, r.said, x.want)
		}
	}
}
