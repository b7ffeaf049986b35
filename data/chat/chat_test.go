package chat

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"ulysses/data/tokenizer"
)

const goldens = "../../testdata/goldens/chat"

func readJSON(t *testing.T, path string, v any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(goldens, path))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, v); err != nil {
		t.Fatal(path, err)
	}
}

// reader returns a Reader of a template of the goldens.
func reader(t *testing.T, template, trainOn string, special []string) *Reader {
	t.Helper()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "tokenizer_config.json"),
		[]byte(`{"bos_token": "<s>", "eos_token": {"content": "</s>"}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	r, err := Open(Options{Template: filepath.Join(goldens, "templates", template+".jinja"), Folder: folder,
		TrainOn: trainOn, Special: special, Date: "2026-03-09"})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func masked(t *testing.T, tok *tokenizer.Tokenizer, d *Document) (tokens int, ranges [][2]int) {
	t.Helper()
	ids, err := tok.Encode(nil, d.Text)
	if err != nil {
		t.Fatal(err)
	}
	spans, err := tok.Spans(nil, d.Text, ids)
	if err != nil {
		t.Fatal(err)
	}
	ranges = [][2]int{}
	for i, in := range d.Mask(nil, spans) {
		if k := len(ranges) - 1; in && k >= 0 && ranges[k][1] == i {
			ranges[k][1]++
		} else if in {
			ranges = append(ranges, [2]int{i, i + 1})
		}
	}
	return len(ids), ranges
}

// expected is a case of expected.json.
type expected struct {
	Template, Conversation string
	Text                   *string
	Qwen2, Gemma           *struct {
		Tokens int
		Ranges [][2]int
	}
}

// With a generation prompt, conversations give the texts of apply_chat_template.
func TestAsk(t *testing.T) {
	var all struct{ Cases []expected }
	readJSON(t, "expected.json", &all)
	conversations := map[string]json.RawMessage{}
	readJSON(t, "conversations.json", &conversations)
	compared := 0
	for _, c := range all.Cases {
		var object map[string]any
		if err := json.Unmarshal(conversations[c.Conversation], &object); err != nil {
			t.Fatal(err)
		}
		if object["add_generation_prompt"] != true || c.Text == nil || c.Template == "forms" {
			continue
		}
		text, err := reader(t, c.Template, All, nil).Ask(conversations[c.Conversation])
		if err != nil || string(text) != *c.Text {
			t.Errorf("%s, %s: %v, got\n%s\nwant\n%s", c.Template, c.Conversation, err, text, *c.Text)
		}
		compared++
	}
	if compared < 10 {
		t.Errorf("%d texts were compared", compared)
	}
	r := reader(t, "qwen3", Assistant, nil)
	for _, words := range []string{"Who?", "{\"a\": 1}\n", "[]", "{", ""} {
		record, err := json.Marshal(
			map[string]any{
				"messages": []any{map[string]any{"role": "user", "content": strings.TrimSuffix(words, "\n")}}})
		if err != nil {
			t.Fatal(err)
		}
		want, err := r.Ask(record)
		if got, e := r.Ask([]byte(words)); string(got) != string(want) || (e == nil) != (err == nil) {
			t.Errorf("%q: %q, %v; want %q, %v", words, got, e, want, err)
		}
	}
	for record, want := range map[string]string{
		`{"messages": "x"}`: `field "messages" is not a list of messages`, `{"messages": [], "messages": []}`: "twice",
		`{"messages": []}`: "the conversation is empty",
		`{"messages": [{"role": "user", "content": "\ud800"}]}`: "half of a surrogate pair",
	} {
		if _, err := r.Ask([]byte(record)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", record, err, want)
		}
	}
}

// Conversations give the texts of apply_chat_template. With a template that has generation tags,
// the trained tokens are the ones of return_assistant_tokens_mask.
func TestGoldens(t *testing.T) {
	var all struct{ Cases []expected }
	readJSON(t, "expected.json", &all)
	conversations := map[string]json.RawMessage{}
	readJSON(t, "conversations.json", &conversations)
	masks, refused := 0, map[string]int{}
	for _, c := range all.Cases {
		var object map[string]any
		if err := json.Unmarshal(conversations[c.Conversation], &object); err != nil {
			t.Fatal(err)
		}
		// Training texts have no generation prompt.
		if object["add_generation_prompt"] == true || c.Text == nil || c.Template == "forms" {
			continue
		}
		for base, want := range map[string]*struct {
			Tokens int
			Ranges [][2]int
		}{"qwen2": c.Qwen2, "gemma": c.Gemma} {
			tok, err := tokenizer.Open(filepath.Join(goldens, base+".json"))
			if err != nil {
				t.Fatal(err)
			}
			name := c.Template + ", " + c.Conversation + ", " + base
			d, err := reader(t, c.Template, Assistant, tok.Special()).Read(conversations[c.Conversation], Auto, "text")
			if err != nil {
				refused[err.Error()]++
				continue
			}
			// Templates that expect strings show the parts in Python's form, or nothing. Our text
			// is of the joined parts.
			if c.Conversation == "parts" && (strings.Contains(*c.Text, "[{") || !strings.Contains(*c.Text, "One")) {
				if !strings.Contains(string(d.Text), "One two") || !strings.Contains(string(d.Text), "Three") {
					t.Errorf("%s: %s", name, d.Text)
				}
				continue
			}
			if string(d.Text) != *c.Text {
				t.Errorf("%s: got\n%s\nwant\n%s", name, d.Text, *c.Text)
				continue
			}
			if want == nil {
				continue
			}
			masks++
			if tokens, ranges := masked(t, tok, d); tokens != want.Tokens || !reflect.DeepEqual(ranges, want.Ranges) {
				t.Errorf("%s: %d tokens, trained %v; want %d, %v\n%s", name, tokens, ranges, want.Tokens, want.Ranges,
					strings.ReplaceAll(*c.Text, "\n", "⏎"))
			}
		}
	}
	for err := range refused {
		if !strings.Contains(err, "leaves out message") && !strings.Contains(err, `has the role "robot"`) &&
			!strings.Contains(err, "is empty") {
			t.Error(err)
		}
	}
	if masks < 70 {
		t.Errorf("%d masks were compared", masks)
	}
}

// Without tags, an assistant's turn is found by the generation prompt and the end token. It is the
// output of the tags of the same template with tags, without the end of the generation prompt and
// the newline behind the end token that some tags enclose.
func TestTurnsAreTaggedTurns(t *testing.T) {
	conversations := map[string]json.RawMessage{}
	readJSON(t, "conversations.json", &conversations)
	tok, err := tokenizer.Open(filepath.Join(goldens, "qwen2.json"))
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, name := range []string{"llama3", "qwen2_5", "qwen3", "qwen3_5_think", "gemma3", "gptoss", "deepseekv3"} {
		for conversation, raw := range conversations {
			plain, err1 := reader(t, name, Assistant, tok.Special()).Read(raw, Auto, "text")
			tagged, err2 := reader(t, name+"_training", Assistant, tok.Special()).Read(raw, Auto, "text")
			if err1 != nil || err2 != nil || string(plain.Text) != string(tagged.Text) {
				continue
			}
			compared++
			shown := func(d *Document) (s []string) {
				for _, r := range d.Trained {
					x := strings.TrimSuffix(string(d.Text[r.Lo:r.Hi]), "\n")
					if i := strings.LastIndex(string(d.Text[:r.Lo]), "<think>\n"); name == "qwen3_5_think" &&
						i == r.Lo-8 {
						x = "<think>\n" + x
					}
					prompts := []string{"<|start|>assistant", "<｜Assistant｜>", "\n"}
					// with enable_thinking = false, the generation prompt has the empty reasoning
					if conversation == "options" {
						prompts = append(prompts, "<think>\n\n</think>\n\n")
					}
					for _, prompt := range prompts {
						x = strings.TrimPrefix(x, prompt)
					}
					s = append(s, x)
				}
				return s
			}
			if a, b := shown(plain), shown(tagged); !reflect.DeepEqual(a, b) {
				t.Errorf("%s, %s: %q; tagged %q", name, conversation, a, b)
			}
		}
	}
	if compared < 20 {
		t.Errorf("%d renderings were compared", compared)
	}
}

// In gpt-oss, a call without arguments is trained to its end, and headers of tool results, which
// show the name of the called function, are not trained.
func TestToolCallsOfGPTOSS(t *testing.T) {
	const (
		asked  = `{"role": "user", "content": "Who?"}`
		result = `{"role": "tool", "content": "x"}`
		answer = `{"role": "assistant", "content": "Me."}`
		said   = "<|channel|>final<|message|>Me.<|return|>"
	)
	call := func(arguments string) string {
		return `{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "ask", "arguments": ` +
			arguments + `}}]}`
	}
	called := func(arguments string) string {
		return " to=functions.ask<|channel|>commentary json<|message|>" + arguments + "<|call|>"
	}
	special := []string{"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"}
	for _, c := range []struct {
		messages []string
		want     []string
	}{
		{[]string{asked, call(`{"a": {}}`), result, answer}, []string{called(`{"a": {}}`), said}},
		{[]string{asked, call("{}"), result, answer}, []string{called("{}"), said}},
		{[]string{asked, call(`"{}"`), result, answer}, []string{called("{}"), said}},
		{[]string{asked, call(`{"a": 1}`), result, result, result, answer}, []string{called(`{"a": 1}`), said}},
		{[]string{asked, call("{}"), result, result, call("{}"), result, result, answer},
			[]string{called("{}"), called("{}"), said}},
	} {
		record := `{"messages": [` + strings.Join(c.messages, ", ") + "]}"
		d, err := reader(t, "gptoss", Assistant, special).Read([]byte(record), Auto, "text")
		if err != nil {
			t.Errorf("%s: %v", record, err)
			continue
		}
		var got []string
		for _, r := range d.Trained {
			got = append(got, string(d.Text[r.Lo:r.Hi]))
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: trained %q, want %q", record, got, c.want)
		}
	}
}

// trainedTexts returns what is trained of a record with a template.
func trainedTexts(t *testing.T, template string, o Options, record string) (got []string) {
	t.Helper()
	folder := t.TempDir()
	for name, text := range map[string]string{"chat_template.jinja": template,
		"tokenizer_config.json": `{"bos_token": "<s>", "eos_token": "</s>"}`} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	o.Template, o.Folder, o.TrainOn = folder, folder, Assistant
	r, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	d, err := r.Read([]byte(record), Auto, "text")
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range d.Trained {
		got = append(got, string(d.Text[x.Lo:x.Hi]))
	}
	return got
}

// A template may join the arguments of a call to a string, as DeepSeek R1's does: it gets the
// string of the record. Others get an object.
func TestArgumentsInStrings(t *testing.T) {
	record := `{"messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "ask", "arguments": "{\"a\":1}"}}]}]}`
	for _, c := range []struct{ write, want string }{
		{`'ask ' + call.function.arguments`, `ask {"a":1}</s>`},
		{`'ask ' ~ call.function.arguments|tojson`, `ask {"a": 1}</s>`},
	} {
		template := `{% for m in messages %}{% if m.tool_calls %}<a>{% for call in m.tool_calls %}{{ ` + c.write +
			` }}{% endfor %}</s>{% else %}{{ '<u>' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}`
		if got := trainedTexts(t, template, Options{Special: []string{"<a>", "<u>", "</s>"}},
			record); !reflect.DeepEqual(got, []string{c.want}) {
			t.Errorf("%s: trained %q, want %q", c.write, got, c.want)
		}
	}
}

// Arguments that are not JSON stay the string of the record, also if they begin with an object.
func TestArgumentsThatAreNotJSON(t *testing.T) {
	for _, arguments := range []string{`{"a": 1}}`, `{"a": 1}]`, `{"a": 1} b`, `{"a": 1`} {
		call, err := json.Marshal(arguments)
		if err != nil {
			t.Fatal(err)
		}
		record := `{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "tool_calls": [` +
			`{"function": {"name": "ask", "arguments": ` + string(call) + `}}]}]}`
		got := trainedTexts(t, `{% for m in messages %}{% if m.tool_calls %}<a>`+
			`{% set a = m.tool_calls[0].function.arguments %}{{ a if a is string else a | tojson }}</s>{% else %}{{ '<u>' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}`,
			Options{Special: []string{"<a>", "<u>", "</s>"}}, record)
		if want := []string{arguments + "</s>"}; !reflect.DeepEqual(got, want) {
			t.Errorf("trained %q, want %q", got, want)
		}
	}
}

// The turn of an assistant ends with the end mark that stands behind its end token, as in Command
// A.
func TestEndMarkBehindEndToken(t *testing.T) {
	const template = `{% for m in messages %}<|turn|>{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|bot|><|answer|>{{ m.content }}<|/answer|>{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<|turn|><|bot|>{% endif %}`
	o := Options{Special: []string{"<|turn|>", "<|user|>", "<|bot|>", "<|answer|>", "<|/answer|>", "</s>"}}
	got := trainedTexts(t, template, o,
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}`)
	if want := []string{"<|answer|>b<|/answer|></s>", "<|answer|>d<|/answer|></s>"}; !reflect.DeepEqual(got, want) {
		t.Errorf("trained %q, want %q", got, want)
	}
}

// The start of a turn is found with templates that render conversations with tools only, that end
// with the generation prompt always, or that have none.
func TestStartOfTurns(t *testing.T) {
	const (
		special = "<|im_start|> <|im_end|> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] </s>"
		asked   = `{"role": "user", "content": "a"}`
		called  = `{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}`
		result  = `{"role": "tool", "content": "r"}`
		said    = `{"role": "assistant", "content": "b"}`
		chatML  = `{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}`
		prompt  = `{{ '<|im_start|>assistant\n' }}`
		mistral = `{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls[0].function.name }}</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}`
	)
	for name, c := range map[string]struct {
		template, tools string
		messages        []string
		want            []string
	}{
		"with tools only, as Hermes 2 Pro": {`{% for x in tools %}{{ x.function.name }}{% endfor %}` +
			chatML + `{% if add_generation_prompt %}` + prompt + `{% endif %}`,
			`[{"type": "function", "function": {"name": "f"}}]`, []string{asked, said}, []string{"b<|im_end|>"}},
		"always a generation prompt, as the first Llama 3": {chatML + prompt, "null",
			[]string{asked, said, asked, said}, []string{"b<|im_end|>", "b<|im_end|>"}},
		"no generation prompt, as Mistral": {mistral, "null",
			[]string{asked, called, result, called, result, said},
			[]string{"[TOOL_CALLS]f</s>", "[TOOL_CALLS]f</s>", " b</s>"}},
		"no generation prompt, roles in tokens": {
			`{% for m in messages %}{{ '[INST]' if m.role == 'user' else '[/INST]' }}{{ m.content }}</s>{% endfor %}`,
			"null", []string{asked, said, asked, said}, []string{"b</s>", "b</s>"}},
	} {
		record := `{"messages": [` + strings.Join(c.messages, ", ") + `], "tools": ` + c.tools + "}"
		if got := trainedTexts(t, c.template, Options{Special: strings.Fields(special)},
			record); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: trained %q, want %q", name, got, c.want)
		}
	}
}

// BenchmarkRead renders conversations and finds their trained bytes.
func BenchmarkRead(b *testing.B) {
	conversations := map[string]json.RawMessage{}
	text, err := os.ReadFile(filepath.Join(goldens, "conversations.json"))
	if err == nil {
		err = json.Unmarshal(text, &conversations)
	}
	if err != nil {
		b.Fatal(err)
	}
	for _, template := range []string{"qwen2_5", "qwen3", "gptoss"} {
		b.Run(template, func(b *testing.B) {
			r, err := Open(Options{Template: filepath.Join(goldens, "templates", template+".jinja"), TrainOn: Assistant,
				Date:    "2026-01-31",
				Special: []string{"<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|return|>"}})
			if err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(conversations["multi"])))
			for b.Loop() {
				if _, err := r.Read(conversations["multi"], Auto, "text"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
