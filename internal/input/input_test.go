package input

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Paths that are not regular files are refused by their kind, at once: a pipe without a writer
// would make Open wait forever.
func TestOnlyRegularFiles(t *testing.T) {
	dir := t.TempDir()
	pipe, socket, file := filepath.Join(dir, "pipe"), filepath.Join(dir, "socket"), filepath.Join(dir, "file")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.WriteFile(file, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(pipe, link); err != nil {
		t.Fatal(err)
	}
	for path, kind := range map[string]string{pipe: "a named pipe", link: "a named pipe", socket: "a socket",
		dir: "a folder", "/dev/zero": "a device"} {
		_, _, err := Open(path)
		var e *KindError
		if !errors.As(err, &e) || !strings.Contains(err.Error(), path+" is "+kind) {
			t.Errorf("%s: %v", path, err)
		}
		if _, err := Read(path, 10); !errors.As(err, &e) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := Read(filepath.Join(dir, "none"), 10); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if text, err := Read(file, 5); err != nil || string(text) != "12345" {
		t.Errorf("%q %v", text, err)
	}
	if _, err := Read(file, 4); err == nil || !strings.Contains(err.Error(), "has 5 bytes, and at most 4 are read") {
		t.Error(err)
	}
}

func TestJSON(t *testing.T) {
	for text, want := range map[string]string{
		`{"a": 1, "b": {"a": 1}, "c": [{"a": 1}, {"a": 2}]}`:     "",
		` {"a": "a", "b": ["a", "a"], "\"": "{\"a\"", "\\": 2} `: "",
		`[]`:                          "",
		`{"a": 1, "a": 1}`:            `the key "a" is there twice, the second time at byte 9`,
		`{"a": 1, "\u0061": 1}`:       `the key "a" is there twice`,
		"{\"\xff\": 1, \"\xfe\": 1}":  "is there twice",
		`{"x": [1, {"b": 1, "b":2}]}`: `the key "b" is there twice`,
		`{"a": 1, "b": [1], "c": {}, "d": 1, "e": 1, "f": 1, "g": 1, "h": 1, "i": 1, "j": 1, "c": 1}`: `the key "c" is there twice`,
		`{"a": 1} 2`: "after top-level value",
		`{"a": 1}}`:  "after top-level value",
		`{"a": 1`:    "unexpected end",
		``:           "unexpected end",
	} {
		var v any
		if err := JSON([]byte(text), &v); err == nil && want != "" || err != nil &&
			(want == "" || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	long := strings.Repeat("é", 1<<20)
	var v struct{ A int }
	for _, text := range []string{`{"a": ` + strings.Repeat("1", 1<<20) + `}`, `{"a": 1, "` + long + `": 1, "` + long +
		`": 1}`} {
		if err := JSON([]byte(text), &v); err == nil || len(err.Error()) > 300 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
	}
	if s := Quote(long); len(s) > 130 || !strings.HasSuffix(s, `é"… (2097152 bytes)`) {
		t.Error(s)
	}
	if s := Words("a " + long + "\t" + long + "\n" + strings.Repeat("b", 900)); len(s) > 1200 ||
		strings.Count(s, "… (2097152 bytes)") != 2 || !strings.HasPrefix(s, "a é") || !strings.Contains(s, "bytes)\t") {
		t.Error(s)
	}
	if s := Short("short"); s != "short" {
		t.Error(s)
	}
}

// Once accepts text that is not JSON, and finds the same repeated keys as a decoder by tokens.
func FuzzOnce(f *testing.F) {
	for _, s := range []string{`{"a":1,"a":2}`, `{"a":{"a":[{"b":1,"b":1}]}}`, `"\"`, `{"\u0061":1,"a":[]}`, `}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		err := Once(text)
		if json.Valid(text) && (err != nil) != twice(text) {
			t.Errorf("%q: %v", text, err)
		}
	})
}

func twice(text []byte) bool {
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	found := false
	var value func()
	value = func() {
		switch token, _ := d.Token(); token {
		case json.Delim('{'):
			seen := map[json.Token]bool{}
			for d.More() {
				key, _ := d.Token()
				found = found || seen[key]
				seen[key] = true
				value()
			}
			d.Token()
		case json.Delim('['):
			for d.More() {
				value()
			}
			d.Token()
		}
	}
	value()
	return found
}
