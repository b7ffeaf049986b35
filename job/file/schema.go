package file

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// field is a key of the job file. It is derived from a struct field and its tags.
type field struct {
	key   string // "data.sequence"
	index []int  // for reflect.Value.FieldByIndex of a Job
	typ   reflect.Type
	tag   reflect.StructTag
}

// schema lists all keys in the order of the structs; tables lists all tables.
var schema, tables = walk(reflect.TypeFor[Job](), "", nil)

var byKey = func() map[string]*field {
	m := map[string]*field{}
	for i := range schema {
		m[schema[i].key] = &schema[i]
	}
	return m
}()

// walk returns the keys and tables of a struct type.
func walk(t reflect.Type, prefix string, index []int) (fields []field, tables []string) {
	for i := range t.NumField() {
		f := t.Field(i)
		name := f.Tag.Get("toml")
		if name == "" || name == "-" {
			continue
		}
		at := append(index[:len(index):len(index)], i)
		if f.Type.Kind() == reflect.Struct {
			sub, subTables := walk(f.Type, prefix+name+".", at)
			fields = append(fields, sub...)
			tables = append(append(tables, prefix+name), subTables...)
			continue
		}
		fields = append(fields, field{prefix + name, at, f.Type, f.Tag})
	}
	return fields, tables
}

func isTable(key string) bool {
	for _, t := range tables {
		if t == key {
			return true
		}
	}
	return false
}

// set checks the type, the bounds and the words of a TOML value and stores it. It stores nothing if
// it returns an error.
func (f *field) set(j *Job, value any) error {
	dst := reflect.ValueOf(j).Elem().FieldByIndex(f.index)
	v := reflect.New(f.typ).Elem()
	if err := f.convert(v, value); err != nil {
		return err
	}
	dst.Set(v)
	return nil
}

func (f *field) convert(dst reflect.Value, value any) error {
	switch dst.Kind() {
	case reflect.String:
		return f.word(dst, value)
	case reflect.Bool:
		b, ok := value.(bool)
		if !ok {
			return f.wrong(value, "true or false is needed")
		}
		dst.SetBool(b)
	case reflect.Int64:
		n, ok := value.(int64)
		if x, isFloat := value.(float64); isFloat && x == math.Trunc(x) && math.Abs(x) < 1<<53 {
			return f.wrong(value, "an integer is needed; write %d", int64(x))
		} else if !ok {
			// a --set whose integer does not fit is text
			if _, err := strconv.ParseInt(fmt.Sprint(value), 10, 64); errors.Is(err, strconv.ErrRange) {
				return f.wrong(value, "out of range for int64")
			}
			return f.wrong(value, "an integer is needed")
		}
		dst.SetInt(n)
		return f.inBounds(value, float64(n))
	case reflect.Float64:
		x, ok := value.(float64)
		if n, isInt := value.(int64); isInt {
			x, ok = float64(n), true
		}
		if unit := f.tag.Get("unit"); !ok && unit != "" {
			return f.wrong(value, "write the number of %s alone, such as 80", unit)
		} else if !ok {
			return f.wrong(value, "a number is needed")
		}
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return f.wrong(value, "a finite number is needed")
		}
		dst.SetFloat(x)
		return f.inBounds(value, x)
	case reflect.Map:
		m, ok := value.(map[string]any)
		if !ok {
			return f.wrong(value, "write a table of %s", f.tag.Get("table"))
		}
		dst.Set(reflect.ValueOf(m))
	case reflect.Slice, reflect.Array:
		return f.list(dst, value)
	case reflect.Struct:
		return f.table(dst, value)
	}
	return nil
}

// table fills a struct from a table of a list of tables, such as [[data.source]].
func (f *field) table(dst reflect.Value, value any) error {
	m, ok := value.(map[string]any)
	if !ok {
		return f.wrong(value, "tables are needed; write [[%s]] and its keys below", f.key)
	}
	known := map[string]bool{}
	var names []string
	for i := range dst.NumField() {
		tag := dst.Type().Field(i).Tag
		name := tag.Get("toml")
		known[name], names = true, append(names, name)
		of := field{key: f.key + "." + name, typ: dst.Type().Field(i).Type, tag: tag}
		switch v, set := m[name]; {
		case set:
			if err := of.convert(dst.Field(i), v); err != nil {
				return err
			}
		case tag.Get("default") != "":
			dst.Field(i).SetString(tag.Get("default"))
		case dst.Field(i).Kind() == reflect.Float64 && tag.Get("required") == "":
			dst.Field(i).SetFloat(1)
		default:
			return status.Errorf(status.InvalidConfig, "%s: missing; each table [[%s]] needs it", of.key, f.key)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if !known[name] {
			return status.Errorf(status.InvalidConfig, "%s.%s: unknown key; the keys of [[%s]] are %s", f.key, name,
				f.key, strings.Join(names, ", "))
		}
	}
	return nil
}

// list fills a slice, or an array with as many values as it has elements. A single string may stand
// for a list of one string.
func (f *field) list(dst reflect.Value, value any) error {
	values, ok := value.([]any)
	if tables, isTables := value.([]map[string]any); isTables && dst.Type().Elem().Kind() == reflect.Struct {
		for _, t := range tables {
			values = append(values, t)
		}
		ok = true
	}
	if _, text := value.(string); text && dst.Kind() == reflect.Slice && dst.Type().Elem().Kind() == reflect.String {
		values, ok = []any{value}, true
	}
	what := map[reflect.Kind]string{reflect.String: "strings", reflect.Int64: "integers", reflect.Float64: "numbers",
		reflect.Struct: "tables"}[dst.Type().Elem().Kind()]
	if dst.Kind() == reflect.Slice {
		dst.Set(reflect.MakeSlice(dst.Type(), len(values), len(values)))
	} else if what = fmt.Sprintf("%d %s", dst.Len(), what); len(values) != dst.Len() {
		ok = false
	}
	if !ok {
		return f.wrong(value, "a list of %s is needed", what)
	}
	for i, x := range values {
		if err := f.convert(dst.Index(i), x); err != nil {
			return err
		}
	}
	return nil
}

// word stores a string, or an integer in decimal, that the tags of the key allow.
func (f *field) word(dst reflect.Value, value any) error {
	s, ok := value.(string)
	words := strings.Fields(f.tag.Get("enum"))
	number, hasNumber := f.tag.Lookup("number")
	if n, isInt := value.(int64); isInt && hasNumber {
		s, ok = strconv.FormatInt(n, 10), true
	}
	if !ok {
		return f.wrong(value, "%s is needed", f.choices("a string"))
	}
	dst.SetString(s)
	if len(words) == 0 || f.tag.Get("path") != "" {
		return nil
	}
	for _, w := range words {
		if s == w {
			return nil
		}
	}
	if hasNumber {
		least, _ := strconv.ParseInt(number, 10, 64)
		if n, err := strconv.ParseInt(s, 10, 64); err == nil && n >= least {
			return nil
		}
	}
	hint := ""
	near := foreignWords[plain(s)]
	if !slices.Contains(words, near) {
		near = Nearest(s, words)
	}
	if near != "" {
		hint = fmt.Sprintf("; did you mean %q?", near)
	}
	return f.wrong(value, "%s is needed%s", f.choices("a string"), hint)
}

// choices lists the allowed values.
func (f *field) choices(otherwise string) string {
	var c []string
	for _, w := range strings.Fields(f.tag.Get("enum")) {
		c = append(c, strconv.Quote(w))
	}
	if n, ok := f.tag.Lookup("number"); ok {
		c = append(c, "an integer of at least "+n)
	}
	if f.tag.Get("path") != "" && len(c) > 0 {
		c = append(c, "a path")
	}
	switch n := len(c); n {
	case 0:
		return otherwise
	case 1:
		return c[0]
	default:
		return strings.Join(c[:n-1], ", ") + " or " + c[n-1]
	}
}

func (f *field) inBounds(value any, x float64) error {
	for _, bound := range []struct {
		name, words string
		out         func(b float64) bool
	}{
		{"min", "at least", func(b float64) bool { return x < b }},
		{"above", "above", func(b float64) bool { return x <= b }},
		{"max", "at most", func(b float64) bool { return x > b }},
		{"below", "below", func(b float64) bool { return x >= b }},
	} {
		text := f.tag.Get(bound.name)
		if b, err := strconv.ParseFloat(text, 64); err == nil && bound.out(b) {
			return f.wrong(value, "must be %s %s", bound.words, text)
		}
	}
	return nil
}

func (f *field) wrong(value any, format string, args ...any) error {
	return status.Errorf(status.InvalidConfig, "%s = %s: %s", f.key, show(value), fmt.Sprintf(format, args...))
}

// show returns a value as TOML, shortened to a readable length.
func show(value any) string {
	s := ""
	switch v := value.(type) {
	case string:
		s = strconv.Quote(v)
	case float64:
		if s = strings.TrimPrefix(strconv.FormatFloat(v, 'g', -1, 64), "+"); !strings.ContainsAny(s, ".eIN") {
			s += ".0"
		}
	case time.Time:
		return "a date or time"
	case map[string]any, []map[string]any:
		return "a table"
	case []any:
		elements := make([]string, 0, 4)
		for i, x := range v {
			if i == 4 {
				elements = append(elements, "…")
				break
			}
			elements = append(elements, show(x))
		}
		s = "[" + strings.Join(elements, ", ") + "]"
	default:
		s = fmt.Sprint(v)
	}
	return input.Short(s)
}
