// Package version holds the project's version. The file VERSION is the source; a test compares
// every other place that states a version with it.
package version

import (
	_ "embed"
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
