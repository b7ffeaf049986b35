package file

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"sort"
	"strings"
)

// paths expands variables and makes all paths relative to the current directory.
func (l *loader) paths(getenv func(string) (string, bool)) {
	for i := range l.job.Data.Source {
		for k, p := range l.job.Data.Source[i].Path {
			l.job.Data.Source[i].Path[k] = l.path("data.source", "glob", p, getenv)
		}
	}
	for i := range l.job.Eval.Set {
		for k, p := range l.job.Eval.Set[i].Path {
			l.job.Eval.Set[i].Path[k] = l.path("eval.set", "glob", p, getenv)
		}
	}
	for i := range schema {
		f := &schema[i]
		kind := f.tag.Get("path")
		if kind == "" || l.bad[f.key] {
			continue
		}
		v := reflect.ValueOf(l.job).Elem().FieldByIndex(f.index)
		var texts []reflect.Value
		switch {
		case v.Kind() != reflect.String:
			for k := range v.Len() {
				texts = append(texts, v.Index(k))
			}
		case !slices.Contains(strings.Fields(f.tag.Get("enum")), v.String()):
			texts = append(texts, v)
		}
		written := make([]string, len(texts))
		for k, text := range texts {
			if variable.MatchString(text.String()) {
				written[k] = text.String()
				l.job.written[f.key] = written
			}
			text.SetString(l.path(f.key, kind, text.String(), getenv))
		}
	}
}

// path returns one path of a key; kind is the value of the tag path.
func (l *loader) path(key, kind, value string, getenv func(string) (string, bool)) string {
	o := l.job.Origin(key)
	expanded, err := expand(value, getenv)
	if err != nil {
		l.fault(o, key, "%s: %v", key, err)
		return expanded
	}
	if expanded == "" {
		if l.job.IsSet(key) {
			l.fault(o, key, "%s: empty; name a path", key)
		}
		return expanded
	}
	if strings.ContainsRune(expanded, 0) {
		l.fault(o, key, "%s: the path contains a NUL character; remove it", key)
	}
	if why := NotURL(key, value); why != "" {
		l.fault(o, key, "%s = %s: %s", key, show(value), why)
		return expanded
	}
	dir := filepath.Dir(l.job.Path)
	if filepath.IsAbs(expanded) || o.arg || kind == "inside" {
		dir = ""
	}
	if variable.MatchString(value) {
		l.job.recordExpansion(dir, value, getenv)
	}
	if kind == "inside" {
		return expanded // relative to output.dir; a rule checks it later
	}
	path := filepath.Join(dir, expanded)
	if kind != "glob" {
		return path
	}
	// Only characters in the job file form a pattern. The job file's folder and the values of
	// variables are plain names.
	expanded, _ = expand(value, escaped(getenv))
	pattern := filepath.Join(globEscape.Replace(dir), expanded)
	if _, err := os.Lstat(path); err == nil {
		return path
	}
	if separated.MatchString(value) {
		l.fault(o, key, `%s = %s: a \ does not separate folders here; write /`, key, show(value))
	}
	return pattern
}

// separated finds paths of Windows in a pattern: a \ that escapes no special character.
var separated = regexp.MustCompile(`\\([^*?\[\\]|$)`)

// globEscape escapes a text so that it matches only itself in a pattern.
var globEscape = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)

// escaped returns the values of variables, escaped so that they match only themselves in a pattern.
func escaped(getenv func(string) (string, bool)) func(string) (string, bool) {
	return func(name string) (string, bool) {
		v, ok := getenv(name)
		return globEscape.Replace(v), ok
	}
}

var variable = regexp.MustCompile(`\$\{[^{}$]*\}?`)
var variableName = regexp.MustCompile(`^\$\{[A-Za-z_][A-Za-z0-9_]*\}$`)

// expand replaces ${NAME} by the value of the environment variable.
func expand(s string, getenv func(string) (string, bool)) (string, error) {
	var faults []string
	s = variable.ReplaceAllStringFunc(s, func(m string) string {
		if !variableName.MatchString(m) {
			faults = append(faults, fmt.Sprintf("%q is not of the form ${NAME}", m))
			return m
		}
		v, ok := getenv(m[2 : len(m)-1])
		if !ok {
			faults = append(faults, fmt.Sprintf("environment variable %s is not set", m[2:len(m)-1]))
		}
		return v
	})
	if len(faults) > 0 {
		sort.Strings(faults)
		return s, errors.New(strings.Join(faults, ", "))
	}
	return s, nil
}
