package input

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"unicode/utf8"
)

// JSON decodes one JSON value as json.Unmarshal does. It refuses text after the value, and an
// object that has a key twice, at any depth: readers differ in which of the two values they use.
// Fields that v does not have are ignored, because upstream files have more fields.
func JSON(text []byte, v any) error {
	if err := json.Unmarshal(text, v); err != nil {
		return shortened(err)
	}
	return Once(text)
}

// shortened wraps an error of encoding/json whose text would hold a whole value of the file.
func shortened(err error) error {
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) {
		field := ""
		if kind.Field != "" {
			field = Short(kind.Field) + ": "
		}
		return fmt.Errorf("%sa JSON %s at byte %d; %s is needed", field, Short(kind.Value), kind.Offset,
			typeName(kind.Type.Kind()))
	}
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return fmt.Errorf("not JSON at byte %d: %w", syntax.Offset, err)
	}
	return err
}

// typeName returns the JSON value that a Go type is read from.
func typeName(k reflect.Kind) string {
	switch {
	case k == reflect.Map || k == reflect.Struct:
		return "an object"
	case k == reflect.Slice || k == reflect.Array:
		return "an array"
	case k == reflect.String:
		return "a string"
	case k == reflect.Bool:
		return "true or false"
	case k >= reflect.Int && k <= reflect.Uint64:
		return "a whole number"
	}
	return "a number"
}

// Once refuses valid JSON in which an object has a key twice.
func Once(text []byte) error {
	var open []*object // open objects and lists, the innermost last; nil is a list
	key := false       // the next string is a key
	for at := 0; at < len(text); at++ {
		switch text[at] {
		case '{':
			open, key = append(open, &object{}), true
		case '[':
			open, key = append(open, nil), false
		case '}', ']':
			if len(open) == 0 {
				return errors.New("not JSON")
			}
			open, key = open[:len(open)-1], false
		case ',':
			key = len(open) > 0 && open[len(open)-1] != nil
		case '"':
			end := at + 1
			for end < len(text) && text[end] != '"' {
				if text[end] == '\\' {
					end++
				}
				end++
			}
			if end >= len(text) {
				return errors.New("not JSON")
			}
			if name := keyOf(text[at+1 : end]); key && !open[len(open)-1].add(name) {
				return fmt.Errorf("the key %s is there twice, the second time at byte %d", Quote(string(name)), at)
			}
			at, key = end, false
		}
	}
	return nil
}

// keyOf returns a key without escapes, as encoding/json decodes it.
func keyOf(raw []byte) []byte {
	if bytes.IndexByte(raw, '\\') < 0 && utf8.Valid(raw) {
		return raw
	}
	var s string
	if json.Unmarshal(fmt.Appendf(nil, `"%s"`, raw), &s) != nil {
		return raw
	}
	return []byte(s)
}

// object holds the keys of an open object. A few keys are compared one by one.
type object struct {
	few  [8][]byte
	n    int
	many map[string]struct{}
}

// add reports whether a key is new.
func (o *object) add(key []byte) bool {
	if o.many == nil && o.n < len(o.few) {
		for _, k := range o.few[:o.n] {
			if bytes.Equal(k, key) {
				return false
			}
		}
		o.few[o.n] = key
		o.n++
		return true
	}
	if o.many == nil {
		o.many = map[string]struct{}{}
		for _, k := range o.few {
			o.many[string(k)] = struct{}{}
		}
	}
	if _, twice := o.many[string(key)]; twice {
		return false
	}
	o.many[string(key)] = struct{}{}
	return true
}
