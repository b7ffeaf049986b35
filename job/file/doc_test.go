package file

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// docs/job-file.md must have every key of the schema in its table, with its default, and no other;
// and name every word that is allowed.
func TestDocumented(t *testing.T) {
	b, err := os.ReadFile("../../docs/job-file.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("^\\| `([a-z0-9_]+)` \\| (.*?) \\| (.*?) \\| (.*)\\|$")
	prefix, rows := "", map[string][]string{}
	for _, line := range strings.Split(string(b), "\n") {
		if h, ok := strings.CutPrefix(line, "## "); ok {
			prefix = ""
			if strings.HasPrefix(h, "[") {
				prefix = strings.Trim(h, "[]") + "."
			}
		} else if m := row.FindStringSubmatch(line); m != nil {
			rows[prefix+m[1]] = m[2:]
		}
	}
	for _, f := range schema {
		r := rows[f.key]
		if r == nil {
			t.Errorf("%s has no row", f.key)
			continue
		}
		delete(rows, f.key)
		want := "none"
		if d := f.get(&defaults); d != "" {
			want = "`" + asTOML(d) + "`"
		}
		if r[1] != want {
			t.Errorf("%s: default %s, want %s", f.key, r[1], want)
		}
		for _, word := range strings.Fields(f.tag.Get("enum")) {
			if !strings.Contains(r[0], "`"+word+"`") && r[0] != "word" {
				t.Errorf("%s: %q is not named", f.key, word)
			}
		}
		if refused := strings.Contains(r[2], "Refused today"); refused != isRefused(f.key) &&
			f.key != "attention.block" {
			t.Errorf("%s: refused in the document: %v, by the program: %v", f.key, refused, isRefused(f.key))
		}
	}
	for key := range rows {
		t.Errorf("%s is not a key", key)
	}
}

// docs/plan.md has every key of a cluster's file, with its default, and examples/clusters/h200.toml
// is one.
func TestPlansAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../../docs/plan.md")
	if err != nil {
		t.Fatal(err)
	}
	none, err := parseCluster("", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range clusterKeys {
		row := fmt.Sprintf("| `%s` | `%s` |", k.key,
			asTOML(reflect.ValueOf(none).Elem().FieldByIndex(k.index).Interface()))
		if !strings.Contains(string(b), row) {
			t.Errorf("docs/plan.md has no row %s", row)
		}
	}
	if rows := strings.Count(string(b), "\n| `"); rows != len(clusterKeys) {
		t.Errorf("docs/plan.md has %d rows of keys, there are %d keys", rows, len(clusterKeys))
	}
	if c, err := ReadCluster("../../examples/clusters/h200.toml"); err != nil || c.Nodes*c.PerNode != 32 ||
		c.Device != "h200" {
		t.Errorf("examples/clusters/h200.toml: %+v, %v", c, err)
	}
}

func isRefused(key string) bool {
	for _, r := range refusals {
		if r.key == key {
			return true
		}
	}
	return false
}

// asTOML writes a default the way the file would.
func asTOML(x any) string {
	switch v := reflect.ValueOf(x); v.Kind() {
	case reflect.Map:
		return "{}"
	case reflect.Slice, reflect.Array:
		var parts []string
		for i := range v.Len() {
			parts = append(parts, show(v.Index(i).Interface()))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	}
	return show(x)
}
