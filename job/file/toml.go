package file

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// TOML formats a value for a job file; a table is written inline.
func TOML(x any) string {
	switch v := reflect.ValueOf(x); v.Kind() {
	case reflect.Map:
		table, ok := x.(map[string]any)
		if !ok {
			return show(x)
		}
		var fields []string
		for _, name := range slices.Sorted(maps.Keys(table)) {
			fields = append(fields, toml.Key{name}.String()+" = "+TOML(table[name]))
		}
		return "{" + strings.Join(fields, ", ") + "}"
	case reflect.Struct:
		if _, ok := x.(time.Time); ok { // a value of TOML
			break
		}
		var fields []string
		for i := range v.NumField() {
			fields = append(fields, v.Type().Field(i).Tag.Get("toml")+" = "+TOML(v.Field(i).Interface()))
		}
		return "{" + strings.Join(fields, ", ") + "}"
	case reflect.Slice, reflect.Array:
		var values []string
		for i := range v.Len() {
			values = append(values, TOML(v.Index(i).Interface()))
		}
		return "[" + strings.Join(values, ", ") + "]"
	}
	text, err := toml.Marshal(map[string]any{"v": x})
	if err != nil {
		return show(x)
	}
	return strings.TrimSpace(strings.TrimPrefix(string(text), "v = "))
}
