package chat

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Templates are found as transformers finds them: files before tokenizer_config.json, which has a
// string or a list, and the template tool_use for records with tools.
func TestTemplates(t *testing.T) {
	const record = `{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}`
	tools := `{"tools": [{"type": "function", "function": {"name": "f"}}], ` + record[1:]
	body := func(name string) string {
		return name + "{% for m in messages %}{{ m.content }}{% endfor %}{{ bos_token }}{{ eos_token }}"
	}
	for _, c := range []struct {
		name         string
		files        map[string]string
		plain, tools string // the beginning of the text, or of the error
	}{
		{"file", map[string]string{"chat_template.jinja": body("F"),
			"tokenizer_config.json": `{"chat_template": "C", "bos_token": "<b>", "eos_token": {"content": "<e>"}}`},
			"Fua<b><e>", "Fua<b><e>"},
		{"string", map[string]string{"tokenizer_config.json": `{"chat_template": "` + body("C") + `"}`}, "Cua", "Cua"},
		{"list", map[string]string{"tokenizer_config.json": `{"chat_template": [{"name": "default", "template": "` +
			body("D") + `"}, {"name": "tool_use", "template": "` + body("T") + `"}]}`}, "Dua", "Tua"},
		{"object", map[string]string{"tokenizer_config.json": `{"chat_template": {"default": "` + body("D") +
			`", "tool_use": "` + body("T") + `"}}`}, "Dua", "Tua"},
		{"of a processor", map[string]string{"tokenizer_config.json": `{"bos_token": "<b>"}`,
			"chat_template.json": `{"chat_template": "` + body("P") + `"}`}, "Pua<b>", "Pua<b>"},
		{"of a tokenizer and a processor", map[string]string{
			"tokenizer_config.json": `{"chat_template": "` + body("C") + `"}`,
			"chat_template.json":    `{"chat_template": "` + body("P") + `"}`}, "Cua", "Cua"},
		{"additional", map[string]string{"chat_template.jinja": body("F"),
			"additional_chat_templates/tool_use.jinja": body("A")}, "Fua", "Aua"},
		{"only tools", map[string]string{"additional_chat_templates/tool_use.jinja": body("A")},
			"has no template named default", "Aua"},
		{"tokens of a model", map[string]string{
			"chat_template.jinja": body("{{ image_token }}{{ boi_token }}{{ eoi_token }}{{ extra }}"),
			"tokenizer_config.json": `{"image_token": "<i>", "boi_token": {"content": "<b>"}, "add_bos_token": true,
				"extra_special_tokens": {"eoi_token": "<e>"}, "model_specific_special_tokens": {"extra": "<x>"}}`},
			"<i><b><e><x>ua", "<i><b><e><x>ua"},
		{"a list of tokens", map[string]string{"chat_template.jinja": body("F{{ extra_special_tokens }}"),
			"tokenizer_config.json": `{"extra_special_tokens": ["<e>"]}`}, "Fua", "Fua"},
		{"none", map[string]string{"tokenizer_config.json": `{"chat_template": null}`,
			"special_tokens_map.json": `{"bos_token": "<b>"}`}, "there is no chat template",
			"there is no chat template"},
		{"wrong", map[string]string{"chat_template.jinja": "{% if %}"}, "an expression is needed",
			"an expression is needed"},
		{"BOM and CRLF",
			map[string]string{"chat_template.jinja": "\ufeffF{% if true %}\r\nx\r\n{% endif %}\r\n" + body("G") +
				"\r\n"}, "Fx\nGua", "Fx\nGua"},
	} {
		folder := t.TempDir()
		for name, text := range c.files {
			path := filepath.Join(folder, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		r, err := Open(Options{Template: folder, Folder: folder, TrainOn: All})
		if err != nil {
			t.Fatal(c.name, err)
		}
		for line, want := range map[string]string{record: c.plain, tools: c.tools} {
			got := ""
			if d, err := r.Read([]byte(line), Auto, "text"); err != nil {
				got = err.Error()
			} else {
				got = string(d.Text)
			}
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q; want %q", c.name, got, want)
			}
		}
	}
	unnamed := t.TempDir() // its template cannot be saved
	if err := os.WriteFile(filepath.Join(unnamed, "tokenizer_config.json"),
		[]byte(`{"chat_template": {"../x": ""}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, o := range []Options{{Template: "no/such/folder", Key: Key}, {Date: "31.1.2026"},
		{Template: unnamed, Key: Key}} {
		if _, err := Open(o); err == nil || !strings.HasPrefix(err.Error(), "data.chat_") {
			t.Errorf("%+v: %v", o, err)
		}
	}
	// Another template, selection or date is another digest.
	digests := map[string]bool{}
	for _, o := range []Options{{TrainOn: All}, {TrainOn: Last}, {TrainOn: All, Date: "2026-01-31"},
		{TrainOn: All, Template: filepath.Join(goldens, "templates", "qwen3.jinja")}} {
		r, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		digests[r.Digest()] = true
	}
	if len(digests) != 4 {
		t.Errorf("%d digests of 4", len(digests))
	}
}

// A token with bytes of a prompt and of an answer is not trained, also if it has parts of a
// character; one with nothing but trained bytes is.
func TestMask(t *testing.T) {
	d := &Document{Text: []byte("user:äöü."), Trained: []Range{{5, 9}}}
	for _, c := range []struct {
		ends []int
		want string
	}{
		{[]int{5, 7, 9, 12}, ".xx."},
		{[]int{4, 7, 9, 12}, "..x."},
		{[]int{5, 6, 7, 8, 9, 10, 12}, ".xxxx.."},
		{[]int{5, 6, 10, 12}, ".x.."},
		{[]int{5, 5, 7, 7, 9, 9, 12}, ".xxxx.."},
		{[]int{12}, "."},
	} {
		got, spans, lo := "", [][2]int{}, 0
		for _, hi := range c.ends {
			spans, lo = append(spans, [2]int{lo, hi}), hi
		}
		for _, in := range d.Mask(nil, spans) {
			got += map[bool]string{true: "x", false: "."}[in]
		}
		if got != c.want {
			t.Errorf("%v: %s; want %s", c.ends, got, c.want)
		}
	}
}
