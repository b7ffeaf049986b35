package version

import (
	"fmt"
	"os"
	"regexp"
	"runtime/debug"
	"strings"
	"testing"
)

// Every file that states a version has the version of the file VERSION.
func TestOneVersion(t *testing.T) {
	var major, minor, patch int
	if n, err := fmt.Sscanf(String, "%d.%d.%d", &major, &minor, &patch); n != 3 || err != nil ||
		String != fmt.Sprintf("%d.%d.%d", major, minor, patch) {
		t.Fatalf("VERSION holds %q: major.minor.patch is needed", file)
	}
	for _, x := range []struct{ file, pattern, want string }{
		{"capi/ulysses.h", `(?m)^#define ULYSSES_VERSION (\S+)u\s`, fmt.Sprint(major*10000 + minor*100 + patch)},
		{"python/ulysses/__init__.py", `(?m)^__version__ = "(.*)"$`, String},
		{"CITATION.cff", `(?m)^version: (.*)$`, String},
		{"CHANGELOG.md", `(?m)^## (\d+\.\d+\.\d+)`, String},
		{"python/pyproject.toml", `(?m)^version = (.*)$`, `{ attr = "ulysses.__version__" }`},
		{"Makefile", `(?m)^VERSION := (.*)$`, "$(shell cat internal/version/VERSION)"},
		{"Makefile", `(?m)^ABI := (.*)$`, fmt.Sprint(major)},
		{"Makefile", `(?m)^\t.*(\$\(GO\) build .* ./cmd/ulysses-mpi)$`,
			"$(GO) build $(STAMP) -tags mpi -o $(PROGRAM) ./cmd/ulysses-mpi"},
	} {
		text, err := os.ReadFile("../../" + x.file)
		if err != nil {
			t.Fatal(err)
		}
		if m := regexp.MustCompile(x.pattern).FindStringSubmatch(string(text)); m == nil || m[1] != x.want {
			t.Errorf("%s: %q, want %q", x.file, m, x.want)
		}
	}
}

// The Makefile's STAMP sets this package's variable, and the program prints it.
func TestStamp(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{`STAMP_FLAGS := -X ulysses/internal/version.commit=$(COMMIT)`,
		`STAMP := -ldflags "$(STAMP_FLAGS)"`,
		`LIBRARY = CGO_ENABLED=1 $(GO) build -buildmode=c-shared -ldflags "$(STAMP_FLAGS)`} {
		if !strings.Contains(string(makefile), line) {
			t.Errorf("the Makefile has no line with %s", line)
		}
	}
	commit = "0123456789ab+"
	defer func() { commit = "" }()
	if Commit() != "0123456789ab+" {
		t.Error(Commit())
	}
}

func TestCommit(t *testing.T) {
	setting := func(pairs ...string) *debug.BuildInfo {
		info := &debug.BuildInfo{}
		for i := 0; i < len(pairs); i += 2 {
			info.Settings = append(info.Settings, debug.BuildSetting{Key: pairs[i], Value: pairs[i+1]})
		}
		return info
	}
	for _, x := range []struct {
		info *debug.BuildInfo
		want string
	}{
		{nil, ""}, {setting(), ""}, {setting("vcs.modified", "true"), ""},
		{setting("vcs.revision", "996eabf0123456789", "vcs.modified", "false"), "996eabf01234"},
		{setting("vcs.revision", "996eabf0123456789", "vcs.modified", "true"), "996eabf01234+"},
	} {
		if got := commitOf(x.info); got != x.want {
			t.Errorf("%+v: %q, want %q", x.info, got, x.want)
		}
	}
}
