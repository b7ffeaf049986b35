package jinja

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const goldens = "../../../testdata/goldens/chat/"

// golden is a case of expected.json.
type golden struct {
	Template, Conversation string
	Text, Error            *string
}

// variables returns what apply_chat_template passes to a template.
func variables(t *testing.T, conversation []byte) *Dict {
	t.Helper()
	v, err := FromJSON(conversation, 0, 50)
	if err != nil {
		t.Fatal(err)
	}
	c := v.(*Dict)
	vars := NewDict()
	messages, _ := c.Get("messages")
	for _, m := range messages.(*List).Items {
		d := m.(*Dict)
		if x, ok := d.Get("reasoning_content"); ok {
			d.Set("thinking", x)
		}
	}
	vars.Set("messages", messages)
	for _, name := range []string{"tools", "documents"} {
		x, _ := c.Get(name)
		vars.Set(name, x)
	}
	prompt, ok := c.Get("add_generation_prompt")
	vars.Set("add_generation_prompt", ok && prompt == true)
	vars.Set("bos_token", Text{S: "<s>"})
	vars.Set("eos_token", Text{S: "</s>"})
	if more, ok := c.Get("chat_template_kwargs"); ok {
		more.(*Dict).Each(vars.Set)
	}
	return vars
}

// Templates render as apply_chat_template of transformers does (testdata/goldens/chat.py).
func TestGoldens(t *testing.T) {
	folder := goldens
	if other := os.Getenv("ULYSSES_CHAT_GOLDENS"); other != "" {
		folder = other
	}
	read := func(path string, v any) []byte {
		text, err := os.ReadFile(filepath.Join(folder, path))
		if err != nil {
			t.Fatal(err)
		}
		if v != nil {
			if err := json.Unmarshal(text, v); err != nil {
				t.Fatal(err)
			}
		}
		return text
	}
	var expected struct{ Cases []golden }
	read("expected.json", &expected)
	conversations := map[string]json.RawMessage{}
	read("conversations.json", &conversations)
	now := func() time.Time { return time.Date(2026, 3, 9, 8, 5, 7, 0, time.UTC) }
	refused := 0
	for _, c := range expected.Cases {
		text := read("templates/"+c.Template+".jinja", nil)
		name := c.Template + ", " + c.Conversation
		template, err := Parse(string(text))
		var got Text
		if err == nil {
			input := conversations[c.Conversation]
			got, err = template.Render(variables(t, input), now, DefaultLimits(len(input)))
		}
		switch {
		case c.Text == nil && err == nil:
			t.Errorf("%s: no error; want %s", name, *c.Error)
		case c.Text == nil:
			refused++
			if raised, ok := strings.CutPrefix(*c.Error, "TemplateError: "); ok &&
				!strings.Contains(err.Error(), "raises") {
				t.Errorf("%s: %v; want %s", name, err, raised)
			}
		case err != nil:
			t.Errorf("%s: %v", name, err)
		case got.S != *c.Text:
			t.Errorf("%s: got\n%s\nwant\n%s", name, got.S, *c.Text)
		}
	}
	if refused == 0 || refused == len(expected.Cases) {
		t.Errorf("%d of %d renderings are errors", refused, len(expected.Cases))
	}
}
