package model

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"
)

// No value of a field ends the program: it is read, or refused with an error.
func TestFieldsOfAnyValue(t *testing.T) {
	values := []any{nil, true, "text", []any{}, []any{nil}, []any{[]any{}}, map[string]any{}, map[string]any{"a": nil},
		json.Number("0"), json.Number("-1"), json.Number("0.5"), json.Number("1e18"), json.Number("-1e300")}
	for _, modelType := range ModelTypes() {
		base := small(modelType, nil)
		r := &reader{where: "config.json", raw: maps.Clone(base), seen: map[string]bool{}}
		readFields(r)
		for _, name := range slices.Sorted(maps.Keys(r.seen)) {
			for _, value := range values {
				func() {
					defer func() {
						if p := recover(); p != nil {
							t.Errorf("%s, %s = %v: %v", modelType, name, value, p)
						}
					}()
					fields := maps.Clone(base)
					fields[name] = value
					if c, err := read("config.json", fields, false); err == nil {
						c.JSON()
					}
				}()
			}
		}
	}
}
