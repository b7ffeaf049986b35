package file

import (
	"maps"
	"reflect"
	"strings"

	"github.com/BurntSushi/toml"
)

// set applies a --set argument, table.key=value.
func (l *loader) set(number int, arg string) {
	o := origin{line: number, set: arg, arg: true}
	name, text, ok := strings.Cut(arg, "=")
	s := scanner{src: strings.TrimSpace(name), line: 1}
	path := s.key()
	if !ok || len(path) == 0 || s.more() || len(path) > maxNesting {
		l.fault(o, "", "not table.key=value; write for example optimizer.lr=1e-4")
		return
	}
	at := func(string) origin { return o }
	value := setValue(strings.TrimSpace(text))
	for n := len(path); n > 0; n-- {
		f := byKey[path[:n].String()]
		if f == nil {
			continue
		}
		if f.typ.Kind() == reflect.Map && n < len(path) {
			l.setField(f, path[n:], value, o)
			return
		}
		if n == len(path) {
			l.assign(f, f.orText(value, strings.TrimSpace(text)), at)
			return
		}
	}
	if t, ok := value.(map[string]any); ok && len(t) == 0 && l.reset(path.String()) {
		return
	}
	for i := len(path) - 1; i >= 0; i-- {
		value = map[string]any{path[i]: value}
	}
	l.table(nil, value.(map[string]any), at)
}

// reset gives all keys of a table their defaults, as if the file did not have the table. It reports
// whether there is such a table.
func (l *loader) reset(table string) (found bool) {
	fresh := Default()
	job, from := reflect.ValueOf(l.job).Elem(), reflect.ValueOf(&fresh).Elem()
	for i := range schema {
		if f := &schema[i]; strings.HasPrefix(f.key, table+".") {
			job.FieldByIndex(f.index).Set(from.FieldByIndex(f.index))
			found = true
		}
	}
	maps.DeleteFunc(l.job.at, func(key string, _ origin) bool { return strings.HasPrefix(key, table+".") })
	return found
}

// setValue returns the text as a TOML value; the text itself if it is not TOML.
func setValue(text string) any {
	var v map[string]any
	if len(text) > maxSource || keyLines("v = "+text).deep > 0 || decodeTOML("v = "+text, &v) != nil || len(v) != 1 {
		return text
	}
	return v["v"]
}

// orText returns text instead of a number, bool or date if the key is a string. For example,
// --set output.dir=2024 names a folder.
func (f *field) orText(value any, text string) any {
	k := f.typ.Kind()
	if k == reflect.Slice {
		if _, isList := value.([]any); isList {
			return value
		}
		k = f.typ.Elem().Kind()
	}
	switch value.(type) {
	case string, []any, map[string]any, []map[string]any:
		return value
	}
	if _, number := f.tag.Lookup("number"); k != reflect.String || number {
		return value
	}
	return text
}

// setField sets one field of a table without fixed keys.
func (l *loader) setField(f *field, path toml.Key, value any, o origin) {
	root := reflect.ValueOf(l.job).Elem().FieldByIndex(f.index)
	if root.IsNil() {
		root.Set(reflect.ValueOf(map[string]any{}))
	}
	m := root.Interface().(map[string]any)
	for _, name := range path[:len(path)-1] {
		sub, ok := m[name].(map[string]any)
		if !ok {
			sub = map[string]any{}
			m[name] = sub
		}
		m = sub
	}
	m[path[len(path)-1]] = value
	key := toml.Key(strings.Split(f.key, "."))
	l.job.at[f.key] = o
	for n := 1; n <= len(path); n++ {
		l.job.at[append(key[:len(key):len(key)], path[:n]...).String()] = o
	}
}

// Completions returns the completions of a partly typed --set argument: the keys that begin with
// it, each with "=", or behind the "=" the words that the key may have.
func Completions(typed string) (found []string) {
	key, _, hasValue := strings.Cut(typed, "=")
	for _, f := range schema {
		switch {
		case !hasValue && strings.HasPrefix(f.key, typed):
			found = append(found, f.key+"=")
		case hasValue && f.key == key:
			words := strings.Fields(f.tag.Get("enum"))
			if f.typ.Kind() == reflect.Bool {
				words = []string{"true", "false"}
			}
			for _, w := range words {
				found = append(found, key+"="+w)
			}
		}
	}
	return found
}
