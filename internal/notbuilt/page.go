package notbuilt

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Page returns docs/not-built.md.
func Page() string {
	var b strings.Builder
	b.WriteString(`# What is not built

This page is for those who want to know whether their job, their model or their host program can run.
Every feature in the tables is refused by name, on all ranks, before anything runs: a job ends with exit
code 3, and a call of the C library returns ` + "`ULYSSES_UNSUPPORTED`" + `. The page and the refusals take their
words from one list (` + "`internal/notbuilt`; `go test ./internal/notbuilt -update` writes the page" + `).
`)
	for _, a := range Areas {
		fmt.Fprintf(&b, "\n## %s\n\n| not built | asked for by | what is built, or what to do |\n|---|---|---|\n", a.Name)
		for _, f := range a.Features {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", f.Name, f.Where, f.Instead)
		}
		if slices.Contains(a.Features, ModelTypes) {
			fmt.Fprintf(&b, "\nModel types that are known and refused: %s.\n", reasons())
		}
	}
	return b.String()
}

// reasons lists the model types of each reason.
func reasons() string {
	types := map[string][]string{}
	for _, t := range slices.Sorted(maps.Keys(ModelTypeReasons)) {
		why, _, _ := strings.Cut(ModelTypeReasons[t], ";")
		types[why] = append(types[why], "`"+t+"`")
	}
	var all []string
	for _, why := range slices.Sorted(maps.Keys(types)) {
		all = append(all, why+" ("+strings.Join(types[why], ", ")+")")
	}
	return strings.Join(all, "; ")
}

// Names returns what the C library's build information calls the features that its header declares.
func Names() (all []string) {
	for _, a := range Areas {
		for _, f := range a.Features {
			all = append(all, f.Names...)
		}
	}
	return all
}
