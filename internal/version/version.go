// Package version holds the project's version. The file VERSION is the source; a test compares
// every other place that states a version with it.
package version

import (
	"crypto/sha256"
	"debug/elf"
	_ "embed"
	"encoding/hex"
	"os"
	"runtime/debug"
	"strings"
)

//go:embed VERSION
var file string

// String returns the version of the program, the C library and the Python package, such as "0.1.0".
var String = strings.TrimSpace(file)

// commit is set by the Makefile, because go build records a commit neither in a linked worktree nor
// with -buildvcs=false.
var commit string

// Commit returns the first 12 digits of the commit that the program was built from, with "+" behind
// them if files differed from the commit, or "" if the build did not record one.
func Commit() string {
	if commit != "" {
		return commit
	}
	info, _ := debug.ReadBuildInfo()
	return commitOf(info)
}

// Build returns the version, the commit and the build ID of the running program, which are equal on
// two machines if they run the same file.
func Build() string {
	text := String
	if c := Commit(); c != "" {
		text += ", commit " + c
	}
	if id := buildID(); id != "" {
		text += ", build " + id
	}
	return text
}

// buildID returns the first digits of a checksum of the build ID that the Go linker has written
// into the running program; "" if it has none.
func buildID() string {
	path, err := os.Executable()
	if err != nil {
		return ""
	}
	f, err := elf.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	note := f.Section(".note.go.buildid")
	if note == nil {
		return ""
	}
	data, err := note.Data()
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:6])
}

func commitOf(info *debug.BuildInfo) string {
	commit, modified := "", ""
	if info == nil {
		return ""
	}
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = "+"
		}
	}
	if commit == "" {
		return ""
	}
	return commit + modified
}
