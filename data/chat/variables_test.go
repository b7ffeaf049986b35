package chat

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// ofJSON returns the values of a job file that JSON values stand for.
func ofJSON(t *testing.T, v any) any {
	t.Helper()
	switch v := v.(type) {
	case json.Number:
		if n, err := strconv.ParseInt(v.String(), 10, 64); err == nil {
			return n
		}
		x, err := v.Float64()
		if err != nil {
			t.Fatal(err)
		}
		return x
	case []any:
		for i := range v {
			v[i] = ofJSON(t, v[i])
		}
	}
	return v
}

// withVariables returns a Reader of a template, or of a template of the goldens, with variables.
func withVariables(t *testing.T, template string, special []string, v Variables) (*Reader, error) {
	t.Helper()
	path := filepath.Join(goldens, "templates", template+".jinja")
	folder := t.TempDir()
	files := map[string]string{"tokenizer_config.json": `{"bos_token": "<s>", "eos_token": "</s>"}`}
	if strings.Contains(template, "{") {
		path, files["t.jinja"] = filepath.Join(folder, "t.jinja"), template
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return Open(Options{Template: path, Folder: folder, TrainOn: Assistant, Special: special, Date: "2026-03-09",
		Variables: v})
}

// Variables of a job give the texts of apply_chat_template with the same keyword arguments
// (testdata/goldens/chat.py), and other texts than without them.
func TestVariables(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(goldens, "variables.json"))
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Template, Conversation, Text string
		Variables                    map[string]any
	}
	d := json.NewDecoder(strings.NewReader(string(text)))
	d.UseNumber()
	if err := d.Decode(&cases); err != nil {
		t.Fatal(err)
	}
	conversations := map[string]json.RawMessage{}
	readJSON(t, "conversations.json", &conversations)
	changed := 0
	for _, c := range cases {
		variables := Variables{}
		for name, v := range c.Variables {
			variables[name] = ofJSON(t, v)
		}
		var got [2]string
		for i, v := range []Variables{variables, nil} {
			r, err := withVariables(t, c.Template, nil, v)
			if err != nil {
				t.Fatal(err)
			}
			if d, err := r.Read(conversations[c.Conversation], Auto, "text"); err == nil {
				got[i] = string(d.Text)
			} else if v != nil {
				t.Errorf("%.20s, %s: %v", c.Template, c.Conversation, err)
			}
		}
		if got[0] != c.Text {
			t.Errorf("%.20s, %s, %v: got\n%s\nwant\n%s", c.Template, c.Conversation, c.Variables, got[0], c.Text)
		}
		if got[0] != got[1] {
			changed++
		}
	}
	if changed < 9 {
		t.Errorf("variables change %d of %d texts", changed, len(cases))
	}
}

// A value in a record takes the place of the job's.
func TestVariablesOfRecords(t *testing.T) {
	r, err := withVariables(t, "{% for m in messages %}{{ m.content }}{% endfor %}{{ a }}{{ b }}", nil,
		Variables{"a": int64(1), "b": "x"})
	if err != nil {
		t.Fatal(err)
	}
	const messages = `{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]`
	for record, want := range map[string]string{messages + "}": "uv1x",
		messages + `, "chat_template_kwargs": {"a": 2}}`: "uv2x"} {
		if d, err := r.Read([]byte(record), Auto, "text"); err != nil || string(d.Text) != want {
			t.Errorf("%+v, %v; want %s", d, err, want)
		}
	}
}

// The generation prompt, which has no loss, is the one with the variables of the job and of the
// record.
func TestPromptWithVariables(t *testing.T) {
	const reasoned = "<think>\n\n</think>\n\nfour<|im_end|>"
	for _, c := range []struct {
		v      Variables
		record string // further fields
		want   string
	}{
		{nil, "", reasoned},
		{Variables{"enable_thinking": true}, "", reasoned},
		{Variables{"enable_thinking": false}, "", "four<|im_end|>"},
		{nil, `, "chat_template_kwargs": {"enable_thinking": false}`, "four<|im_end|>"},
		{nil, `, "chat_template_kwargs": {"other": 1}`, reasoned},
		{Variables{"enable_thinking": false}, `, "chat_template_kwargs": {"enable_thinking": true}`, reasoned},
	} {
		r, err := withVariables(t, "qwen3", []string{"<|im_start|>", "<|im_end|>"}, c.v)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time from memory
			d, err := r.Read(
				[]byte(`{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]`+
					c.record+"}"), Auto, "text")
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			for _, x := range d.Trained {
				got += string(d.Text[x.Lo:x.Hi])
			}
			if got != c.want {
				t.Errorf("%v%s: %q is trained, want %q", c.v, c.record, got, c.want)
			}
		}
	}
}

func TestVariableFaults(t *testing.T) {
	for _, c := range []struct {
		name  string
		value any
		want  string
	}{
		{"messages", "x", "not a variable, because each record has its own; remove it"},
		{"tools", []any{}, "each record has its own"},
		{"bos_token", "x", "the files of the tokenizer have it"},
		{"add_generation_prompt", true, "the text of a record has no generation prompt"},
		{"strftime_now", "x", "which data.chat_date sets"},
		{"tokenize", false, "an argument of apply_chat_template that templates do not see"},
		{"a", map[string]any{"b": int64(1)}, "a table; write a string, a number, true, false, or a list of these"},
		{"a", []any{int64(1), []map[string]any{}}, "a table; write"},
		{"a", time.Now(), "a date; write it as a string"},
		{"a", math.Inf(1), "+Inf is not a finite number"},
		{"aa", int64(1), "t.jinja does not read it; remove it, or correct the name"},
	} {
		_, err := withVariables(t, "{{ messages[0].content }}{{ a }}{{ tools }}{{ bos_token }}", nil,
			Variables{c.name: c.value})
		if err == nil || !strings.HasPrefix(err.Error(), "data.chat_variables."+c.name+": ") ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s = %v: %v; want %s", c.name, c.value, err, c.want)
		}
		if err := CheckVariable(c.name, c.value); (err == nil) != (c.name == "aa") {
			t.Errorf("%s = %v is checked without a template: %v", c.name, c.value, err)
		}
	}
}

// Other values, also of another type, are another digest; without variables it is the one of a
// program that had none.
func TestDigestOfVariables(t *testing.T) {
	seen := map[string]bool{}
	for _, v := range []Variables{nil, {"a": int64(1)}, {"a": 1.0}, {"a": "1"}, {"a": true}, {"a": []any{int64(1)}},
		{"a": []any{1.0}}, {"a": []any{"1"}}, {"b": int64(1)}, {"a": int64(1), "b": int64(1)}} {
		r, err := withVariables(t, "{{ a }}{{ b }}", nil, v)
		if err != nil {
			t.Fatal(err)
		}
		if seen[r.Digest()] {
			t.Errorf("%v has the digest of other values", v)
		}
		seen[r.Digest()] = true
	}
	if none, err := withVariables(t, "{{ a }}{{ b }}", nil, Variables{}); err != nil || !seen[none.Digest()] {
		t.Errorf("no variables: %v, or another digest", err)
	}
}
