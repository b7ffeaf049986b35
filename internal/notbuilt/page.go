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

This page is for readers who want to know whether their job, model or host program can run. Every
feature in the tables is refused by name on all ranks before anything runs: a job ends with exit
code 3, and a call of the C library returns ` + "`ULYSSES_UNSUPPORTED`" + `. The page and the errors
use the same list (` + "`internal/notbuilt`; `go test ./internal/notbuilt -update` writes the page" + `).
`)
	for _, a := range Areas {
		fmt.Fprintf(&b, "\n## %s\n\n| not built | key, field or option | what is built, or what to do |\n|---|---|---|\n",
			a.Name)
		for _, f := range a.Features {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", f.Name, f.Where, f.Instead)
		}
		if slices.Contains(a.Features, ModelTypes) {
			fmt.Fprintf(&b, "\nThese model types are known and refused:\n\n%s", reasons())
		}
	}
	return b.String()
}

// columns is the largest width of a line of the page, outside of tables.
const columns = 100

// reasons returns a Markdown list with the model types of each reason.
func reasons() string {
	types := map[string][]string{}
	for _, t := range slices.Sorted(maps.Keys(ModelTypeReasons)) {
		why := ModelTypeReasons[t]
		types[why] = append(types[why], "`"+t+"`")
	}
	var b strings.Builder
	for _, why := range slices.Sorted(maps.Keys(types)) {
		line := "-"
		for _, word := range strings.Fields(why + ": " + strings.Join(types[why], ", ")) {
			if len(line)+1+len(word) > columns {
				b.WriteString(line + "\n")
				line = " "
			}
			line += " " + word
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}

// Names returns the names of features in the C library's build information.
func Names() (all []string) {
	for _, a := range Areas {
		for _, f := range a.Features {
			all = append(all, f.Names...)
		}
	}
	return all
}
