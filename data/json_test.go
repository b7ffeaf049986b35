package data

import (
	"encoding/json"
	"testing"

	"ulysses/data/chat"
)

// textField returns the text of a line as package chat reads it.
func textField(line []byte, field string) (string, error) {
	d, err := (&chat.Reader{}).Read(line, chat.Text, field)
	if err != nil {
		return "", err
	}
	return string(d.Text), nil
}

// sameField reports whether fastTextField reads a line. It checks that the text is that of
// encoding/json.
func sameField(t *testing.T, line string) (fast bool) {
	t.Helper()
	got, ok := fastTextField([]byte("x"), []byte(line), "text", true)
	if !ok {
		return false
	}
	if want, err := textField([]byte(line), "text"); err != nil || string(got) != "x"+want {
		t.Errorf("%q: %q, encoding/json reads %q, %v", line, got, want, err)
	}
	return true
}

var fields = []string{
	`{"text":"a"}`, `{ "a" : 1 , "text" : "b\n\t\"\\\/\b\f\r" }`, `{"text":"é\u00e9\u20AC\ud83d\ude00"}`,
	`{"meta":{"a":[1,-2.5e+3,0,true,false,null,"x\ny"],"b":{}},"c":[],"text":"ok"}`,
	`{"text":""}`, `{"text":"a","b":{"text":1,"c":{"text":2}},"c":[{"text":1},{"text":2}]}`, `{"n":0.1E-9,"text":"z"}`,
}

func TestFastTextField(t *testing.T) {
	for _, s := range fields {
		if !sameField(t, s) {
			t.Errorf("%q is a usual line and was not read", s)
		}
	}
	for _, s := range []string{`{"text":"first","text":"second"}`, `{"a":1,"text":"t","a":2}`,
		`{"m":{"a":1,"a":1},"text":"t"}`, `{"text":"\ud800"}`, "{\"text\":\"\xff\"}", "{\"text\":\"a\nb\"}",
		`{"text":3}`, `{"text":null}`, `{"text":"a"`, `{"text":"a"}}`, `{"text":"a",}`, `{"text":"a"} x`,
		`{"text" "a"}`, `{}`, `[]`, `{"n":01,"text":"a"}`, `{"n":1.,"text":"a"}`,
		`{"n":-,"text":"a"}`, `{"n":1e,"text":"a"}`, `{"n":tru,"text":"a"}`, `{"n":[1,],"text":"a"}`,
		`{"n":{"a"},"text":"a"}`, `{"n":"\x","text":"a"}`, `{"n":"\u12g4","text":"a"}`, `{"t\u0065xt":"a"}`,
		`{,"text":"a"}`, `{"n":+1,"text":"a"}`, `{"text":"\u12"}`, `{"text":"\ud83dx"}`, `{"text":"\ud83d\u0041"}`, "",
		"{", `{"text`, `{"text":"`, `{"text":"\`} {
		if sameField(t, s) {
			t.Errorf("%q was read", s)
		}
	}
	if _, err := textField([]byte(`{"text":"first","text":"second"}`), "text"); err == nil ||
		err.Error() != `the key "text" is there twice, the second time at byte 16` {
		t.Error(err)
	}
	// Every change of one byte.
	for _, s := range fields {
		for i := range s {
			for c := range 256 {
				b := []byte(s)
				b[i] = byte(c)
				sameField(t, string(b))
			}
			sameField(t, s[:i]+s[i+1:])
		}
	}
}

func FuzzFastTextField(f *testing.F) {
	for _, s := range fields {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) { sameField(t, s) })
}

func BenchmarkField(b *testing.B) {
	text := make([]byte, 0, 5000)
	for len(text) < 4000 {
		text = append(text, "light colour the of refraction \"prism\" é blue\n"...)
	}
	line, _ := json.Marshal(map[string]any{"id": 12345, "text": string(text)})
	b.Run("fast", func(b *testing.B) {
		b.SetBytes(int64(len(line)))
		var dst []byte
		for b.Loop() {
			dst, _ = fastTextField(dst[:0], line, "text", false)
		}
	})
	b.Run("encoding/json", func(b *testing.B) {
		b.SetBytes(int64(len(line)))
		for b.Loop() {
			if _, err := textField(line, "text"); err != nil {
				b.Fatal(err)
			}
		}
	})
}
