package data

import (
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ulysses/data/tokenizer"
)

const chatGoldens = "../testdata/goldens/chat/"

// tags is a template for which a byte is a token: turns end with a newline, which is trained.
const tags = "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}\n{% endgeneration %}{% else %}{{ m.role }}:{{ m.content }}\n{% endif %}{% endfor %}"

// shown returns the ids of a micro-batch as text, with a point for tokens that are no target.
func shown(m *MicroBatch) string {
	b := []byte{}
	for i, id := range m.Targets {
		if i == 0 {
			b = append(b, '.')
		}
		if i+1 == len(m.Targets) {
			break
		}
		if id == Ignore {
			id = '.'
		}
		b = append(b, byte(id))
	}
	return string(b)
}

// Records of all kinds in one file, and what is trained of them.
func TestRecords(t *testing.T) {
	dir := t.TempDir()
	template := file(t, dir, "t.jinja", tags)
	lines := []struct{ line, text, assistant, last, all string }{
		{`{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "ab"}, {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}]}`,
			"user:hi\nA:yo\nuser:ab\nA:cd\n", "..........yo\n..........cd\n", ".......................cd\n",
			".ser:hi\nA:yo\nuser:ab\nA:cd\n"},
		{`{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}`,
			"system:s\nuser:q\nA:r\n", "..................r\n", "..................r\n", ".ystem:s\nuser:q\nA:r\n"},
		{`{"prompt": "2+2=", "completion": "4"}`, "2+2=4", "....4", "....4", ".+2=4"},
		{`{"prompt": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "c"}]}`,
			"user:p\nA:x\nuser:q\nA:c\n", "....................c\n", "....................c\n",
			".ser:p\nA:x\nuser:q\nA:c\n"},
		{`{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "no", "weight": 0}, {"role": "user", "content": "v"}, {"role": "assistant", "content": "ok", "train": true, "name": null}]}`,
			"user:u\nA:no\nuser:v\nA:ok\n", ".....................ok\n", ".....................ok\n",
			".ser:u\nA:no\nuser:v\nA:ok\n"},
		{`{"input_ids": [97, 98, 99, 100], "labels": [-100, -100, 99, 101]}`, "abcd", "..ce", "..ce", "..ce"},
		{`{"input_ids": [97, 98, 99], "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2], "seq_lengths": [3], "assistant_masks": null}`,
			"abc", ".bc", ".bc", ".bc"},
		{`{"text": "plain"}`, "plain", ".lain", ".lain", ".lain"},
		{`{"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ü"}], "tools": null, "system": " ", "functions": []}`,
			"user:é\nA:ü\n", "..........ü\n", "..........ü\n", ".ser:é\nA:ü\n"},
	}
	var all []string
	for _, l := range lines {
		all = append(all, l.line)
	}
	path := file(t, dir, "a.jsonl", strings.Join(all, "\n"))
	for _, trainOn := range []string{"assistant", "last", "all"} {
		for _, unit := range []int64{7, 300, 1 << 16} {
			c := config(1000, path)
			c.Pack, c.TrainOn, c.ChatTemplate = false, trainOn, template
			data, err := Open(c, EvalConfig{}, Options{Vocab: 256, block: unit})
			if err != nil {
				t.Fatal(err)
			}
			for i, m := range whole(t, data.Train()) {
				text := make([]byte, len(m.IDs))
				for k, id := range m.IDs {
					text[k] = byte(id)
				}
				want := map[string]string{"assistant": lines[i].assistant, "last": lines[i].last,
					"all": lines[i].all}[trainOn]
				if string(text) != lines[i].text || shown(&m) != want {
					t.Errorf("%s, record %d: %q, trained %q; want %q, %q", trainOn, i, text, shown(&m),
						lines[i].text, want)
				}
			}
			if s := data.Tokenizer(); !strings.Contains(s, ", conversations ") {
				t.Errorf("a resumed run does not compare the template: %q", s)
			}
			data.Close()
		}
	}
}

// An answer before the last one does not take the place of a last one that is not trained.
func TestLastAnswerThatIsNotTrained(t *testing.T) {
	dir := t.TempDir()
	c := config(1000, file(t, dir, "a.jsonl", `{"messages": [{"role": "user", "content": "u"}, `+
		`{"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}, `+
		`{"role": "assistant", "content": "b", "weight": 0}]}`))
	c.TrainOn, c.ChatTemplate = "last", file(t, dir, "t.jinja", tags)
	_, err := Open(c, EvalConfig{}, Options{Vocab: 256})
	if err == nil || !strings.Contains(err.Error(), "no message of an assistant is trained") {
		t.Error(err)
	}
}

// Every process that reads the same files has the same digest of them, by which a resumed run tells
// whether the checkpoint has the same templates and special tokens.
func TestDigestOfConversations(t *testing.T) {
	dir := t.TempDir()
	tok, err := tokenizer.Open(chatGoldens + "qwen2.json")
	if err != nil {
		t.Fatal(err)
	}
	c := config(1000, file(t, dir, "a.jsonl",
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`))
	c.ChatTemplate = chatGoldens + "templates/qwen3.jinja"
	first := ""
	for i := range 8 {
		data, err := Open(c, EvalConfig{}, Options{Vocab: tok.Size(), Tokenizer: tok})
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = data.Tokenizer()
		}
		if s := data.Tokenizer(); s != first {
			t.Fatalf("the files were opened again and are %q; they were %q", s, first)
		}
		data.Close()
	}
	// conversations that are only evaluated are no property of a run
	e := EvalConfig{Path: c.Path}
	c.Path = []string{file(t, dir, "a.txt", "abc")}
	data, err := Open(c, e, Options{Vocab: tok.Size(), Tokenizer: tok})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	if s := data.Tokenizer(); s != data.TokenizerDigest() || s == first {
		t.Errorf("with conversations in eval.path: %q", s)
	}
}

// A packed sequence has documents with and without labels, and no document's loss reaches over its
// borders.
func TestPackedConversations(t *testing.T) {
	dir := t.TempDir()
	var lines []string
	for i := range 40 {
		lines = append(lines,
			fmt.Sprintf(`{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%d"}]}`,
				strings.Repeat("x", i%7+1), i),
			fmt.Sprintf(`{"text": "t%d"}`, i))
	}
	path := file(t, dir, "a.jsonl", strings.Join(lines, "\n"))
	c := config(32, path)
	c.ChatTemplate = file(t, dir, "t.jinja", tags)
	var first []MicroBatch
	for _, unit := range []int64{50, 1000, 1 << 16} {
		data, err := Open(c, EvalConfig{}, Options{Vocab: 256, block: unit, Workers: 3})
		if err != nil {
			t.Fatal(err)
		}
		got := whole(t, data.Train())
		data.Close()
		for i := range got {
			for _, start := range got[i].CuSeqlens[1:] {
				if got[i].Targets[start-1] != Ignore {
					t.Errorf("sequence %d: the last token of a document has the target %d", i, got[i].Targets[start-1])
				}
			}
		}
		if first == nil {
			first = got
		} else if !reflect.DeepEqual(got, first) {
			t.Errorf("blocks of %d bytes give other sequences", unit)
		}
	}
}

// With a model's tokenizer, the masks are the ones of package chat. A text that the tokenizer
// brings into a normal form is masked by its bytes in that form.
func TestMaskedTokens(t *testing.T) {
	dir := t.TempDir()
	tok, err := tokenizer.Open(chatGoldens + "qwen2.json")
	if err != nil {
		t.Fatal(err)
	}
	path := file(t, dir, "a.jsonl",
		`{"messages": [{"role": "user", "content": "Cafe\u0301?"}, {"role": "assistant", "content": "Noe\u0308l, e\u0301."}]}`)
	c := config(200, path)
	c.Pack, c.ChatTemplate = false, filepath.Join(chatGoldens, "templates", "qwen3.jinja")
	data, err := Open(c, EvalConfig{}, Options{Vocab: tok.Size(), Tokenizer: tok})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	m := whole(t, data.Train())[0]
	var trained []int32
	for _, id := range m.Targets {
		if id != Ignore {
			trained = append(trained, id)
		}
	}
	if got, want := tok.Decode(trained), "<think>\n\n</think>\n\nNoël, é.<|im_end|>"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
	if got, want := tok.Decode(m.IDs),
		"<|im_start|>user\nCafé?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nNoël, é.<|im_end|>\n"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
}

// The token that ends a turn is trained though it takes the newline behind it along, which belongs
// to the template. Phi-3 has such tokens.
func TestEndTokenWithNewline(t *testing.T) {
	dir := t.TempDir()
	file(t, dir, "tokenizer.json",
		`{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": [
		{"id": 2, "content": "<user>", "special": true, "rstrip": true},
		{"id": 3, "content": "<assistant>", "special": true, "rstrip": true},
		{"id": 4, "content": "<end>", "special": true, "rstrip": true}]}`)
	file(t, dir, "chat_template.jinja",
		"{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '<end>\n' }}{% endfor %}"+
			"{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}")
	c := config(20, file(t, dir, "a.jsonl",
		`{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b"}, `+
			`{"role": "user", "content": "a"}, {"role": "assistant", "content": "ab"}]}`))
	c.Tokenizer = dir
	data, err := Open(c, EvalConfig{}, Options{Vocab: 5})
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	m := whole(t, data.Train())[0]
	ids := []int32{2, 0, 4, 3, 1, 4, 2, 0, 4, 3, 0, 1, 4}
	const no = Ignore
	targets := []int32{no, no, no, 1, 4, no, no, no, no, 0, 1, 4, no}
	if !slices.Equal(m.IDs, ids) || !slices.Equal(m.Targets, targets) {
		t.Errorf("%d, targets %d; want %d, targets %d", m.IDs, m.Targets, ids, targets)
	}
}

// Hostile and wrong records are refused with the file and the line.
func TestChatFaults(t *testing.T) {
	dir := t.TempDir()
	good := `{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}`
	messages := func(m string) string { return `{"messages": [` + m + `]}` }
	user := `{"role": "user", "content": "a"}, `
	deep := strings.Repeat("[", 200) + strings.Repeat("]", 200)
	for i, c := range []struct{ template, line, want string }{
		{tags, messages(user + `{"content": "b"}`),
			`message 1 has no role among "content"; write the role of each message`},
		{tags, messages(user + `{"role": null, "content": "b"}`), "message 1 has no role"},
		{tags, messages(user + `{"role": "robot", "content": "b"}`),
			`message 1 has the role "robot"; use one of system, developer, user, assistant`},
		{tags, `{"conversations": [{"from": "human", "value": "a"}, {"from": "bing", "value": "b"}]}`,
			`message 1 is from "bing"; use human, gpt`},
		{tags, messages(user + `{"role": "assistant", "content": ""}`),
			"message 1 of the assistant is empty; remove it, or the record"},
		{tags, messages(`{"role": "user", "content": " \n"}, {"role": "assistant", "content": "b"}`),
			"message 0 of the user is empty"},
		{tags, messages(user + `{"role": "assistant", "content": null}`), "message 1 of the assistant is empty"},
		{tags, `{"system": "s", ` + good[1:], `field "system" is not read; write it as the first message`},
		{tags, `{"functions": [{"name": "f"}], "system": "", ` + good[1:],
			`field "functions" is not read; write them as tools`},
		{tags, messages(""), "the conversation is empty; remove the record"},
		{tags, messages(user[:len(user)-2]),
			`no message of an assistant is trained; remove the record, or set data.train_on = "all"`},
		{tags, messages(user + `{"role": "assistant", "content": 3}`),
			"message 1 has a content that is neither a string nor a list of texts"},
		{tags, messages(user + `{"role": "assistant", "content": [{"type": "image_url", "image_url": "x"}]}`),
			`message 1 has a part of type "image_url", and only text is supported`},
		{tags, messages(user + `"x"`), "message 1 is not an object"},
		{tags, messages(user + `{"role": "assistant", "content": "b", "weight": 2}`),
			"message 1 has another weight than 0 and 1"},
		{tags, messages(user + `{"role": "assistant", "content": "b", "train_detail": []}`),
			"message 1 has train_detail, and only whole messages can be left out"},
		{tags, messages(user + `{"role": "assistant", "content": [{"type": "text", "text": "b", "weight": 0}]}`),
			"message 1 has a part with weight, and only whole messages can be left out; write weight in the message"},
		{tags, messages(user + `{"role": "assistant", "content": "b", "tool_calls": 1}`),
			"message 1 has tool_calls that are not a list"},
		{tags, messages(user + `{"role": "assistant", "role": "user", "content": "b"}`),
			`the key "role" is there twice`},
		{tags, messages(user + `{"role": "assistant", "content": "b", "x": ` + deep + `}`),
			"message 1 cannot be read: the lists and objects are nested too deep"},
		{tags, messages(user + `{"role": "assistant", "content": "b` + "\xff" + `"}`),
			`field "messages" is not UTF-8; convert the file to UTF-8`},
		{tags, messages(user + `{"role": "assistant", "content": "b\ud800"}`), "half of a surrogate pair"},
		{tags, `{"tools": [{"name": "f\ud800"}], ` + good[1:], `field "tools" has half of a surrogate pair`},
		{tags, `{"tools": "[{\"name\": \"f\\ud800\"}]", ` + good[1:], `field "tools" has half of a surrogate pair`},
		{tags, `{"prompt": "a", "completion": "b\udc00"}`, `field "completion" has half of a surrogate pair`},
		{tags, messages(user + `{"role": "assistant", "content": "` + strings.Repeat("b", 20000) + `"}`),
			"the line is longer than 20000 bytes"},
		{tags, `{"messages": {"role": "user"}}`,
			`field "messages" is not a list of messages; write a list of objects with role and content`},
		{tags, `{"messages": "x", "id": 1}`,
			`field "messages" is not a list of messages; write a list of objects with role and content`},
		{tags, `{"conversations": "x"}`,
			`field "conversations" is not a list of messages; write a list of objects with from and value`},
		{tags, `{"messages": [], "text": "x"}`,
			"the record may be read as text or messages; set data.format to one of them"},
		{tags, `{"prompt": "a", "completion": "b", "text": "ab"}`,
			"the record may be read as text or prompt; set data.format to one of them"},
		{tags, `{"prompt": "a", "completion": "b", ` + good[1:], "the record may be read as messages or prompt; set"},
		{tags, `{"input_ids": [1, 2], "prompt": "a", "completion": "b"}`,
			"the record may be read as prompt or tokens; set"},
		{tags, `{"input_ids": [1, 2], "text": "x", ` + good[1:],
			"the record may be read as text or messages or tokens; set"},
		{tags, `{"messages": [` + user, "the line is not JSON at byte"},
		{tags, `{"prompt": "a", "completion": ""}`, "the completion is empty"},
		{tags, `{"prompt": "a", "completion": 1}`,
			`field "completion" is not a string; write prompt and completion as two strings`},
		{tags, `{"input_ids": [1, 2], "labels": [1]}`, "input_ids has 2 ids and labels 1; give both the same length"},
		{tags, `{"input_ids": [1, 300]}`,
			"input_ids, position 1: token id 300 is outside the model's vocabulary of 256"},
		{tags, `{"input_ids": [1, 2], "labels": [-100, 300]}`,
			"labels (-100 = ignored), position 1: token id 300 is outside"},
		{tags, `{"input_ids": [1, 2.5]}`, `field "input_ids" is not a list of integers`},
		{tags, `{"input_ids": [1, null]}`, `field "input_ids" is not a list of integers`},
		{tags, `{"input_ids": [1, 2], "labels": [1, null]}`, `field "labels" is not a list of integers`},
		{tags, `{"input_ids": [1, 2], "labels": []}`, "input_ids has 2 ids and labels 0"},
		{tags, `{"input_ids": [1, 2], "attention_mask": [1, 0]}`,
			"attention_mask, position 1: 0, and only 1 is supported; leave padding out"},
		{tags, `{"input_ids": [1, 2], "attention_mask": [1, 1], "completion_mask": [0, 1]}`,
			"completion_mask, position 0: 0"},
		{tags, `{"input_ids": [1, 2], "assistant_masks": 1}`, `field "assistant_masks" is not a list of integers`},
		{tags, `{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}`,
			"position_ids, position 2: 0, and only one document"},
		{tags, `{"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}`,
			"seq_lengths has 2 values for 3 ids; write 1, or leave the field out"},
		{tags, `{"input_ids": [1, 2, 3], "seq_lengths": [2]}`, "seq_lengths has a document of 2 of 3 tokens"},
		{tags, `{"input_ids": [1, 2, 3], "attention_mask": [1, 1]}`,
			"attention_mask has 2 values for 3 ids; write 3, or leave the field out"},
		{tags, `{"input_ids": [1, 2, 3], "position_ids": [0, 1, 2, 3]}`, "position_ids has 4 values for 3 ids"},
		{tags, `{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}`,
			"loss_mask, position 0: 0, and only 1 is supported; leave padding out, and write labels"},
		{tags, `{"input_ids": [1, 9999999999]}`, "position 1: 9999999999 is not a token id"},
		{tags, messages(user + `{"role": "assistant", "content": "b"}`)[:60] + `], "tools": 3}`,
			"the line is not JSON"},
		{tags, `{"tools": 3, ` + good[1:], `field "tools" is not a list`},
		{tags, `{"tools": "[{", ` + good[1:],
			`field "tools" is a string that is not JSON (EOF); write the value itself, or all of its JSON`},
		{tags, `{"tools": ` + deep + `, ` + good[1:],
			`field "tools" cannot be read: the lists and objects are nested too deep`},
		{tags, `{"chat_template_kwargs": [], ` + good[1:], `field "chat_template_kwargs" is not an object`},
		{tags, `{"chat_template_kwargs": {"x": 1, "add_generation_prompt": true}, ` + good[1:],
			`field "chat_template_kwargs": add_generation_prompt is not a variable, because the text of a record has no generation prompt; remove it`},
		{tags, `{"chat_template_kwargs": {"messages": []}, ` + good[1:],
			`messages is not a variable, because each record has its own; remove it`},
		{"{{ messages[0].content }}", good, `the template leaves out message 1, of the role "assistant"`},
		{"{{ raise_exception('no ' + messages[0].role) }}", good,
			`t.jinja: the template raises "no user" (line 1 of the template)`},
		{"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", good,
			"the template takes more than"},
		{"{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", good,
			"bytes of text (line 1 of the template)"},
		{"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", good, "nested calls"},
		{"{{ messages[0].content.x.y }}", good, "is undefined (line 1 of the template)"},
		{"{{ strftime_now('%Y') }}", good, `set data.chat_date = "2026-01-31", the date that the template shows`},
		{"\n{% if %}", good, "data.chat_template: " + dir + "/"},
		{"", good, "there is no chat template; set data.chat_template to a .jinja file"},
	} {
		sub := t.TempDir()
		d := config(1000, file(t, sub, "a.jsonl", `{"text": "ok"}`+"\n\n"+c.line+"\n"+good+"\n"))
		d.ChatTemplate = "auto"
		if c.template != "" {
			d.ChatTemplate = file(t, dir, fmt.Sprintf("%d-t.jinja", i), c.template)
		}
		// A small limit stands for the 32 MiB of a line.
		data, err := Open(d, EvalConfig{}, Options{Vocab: 256, line: 20000})
		if err == nil {
			data.Close()
			t.Errorf("%.100s: no error; want %s", c.line, c.want)
			continue
		}
		if !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "a.jsonl:3") {
			t.Errorf("%.100s: %v; want a.jsonl:3 and %s", c.line, err, c.want)
		}
	}
}

// The error of a record that may be read in two ways names the key of the format of its file.
func TestKeyOfTheFormat(t *testing.T) {
	dir := t.TempDir()
	one := file(t, dir, "a.txt", "abc")
	two := file(t, dir, "b.jsonl", `{"text": "a", "prompt": "b", "completion": "c"}`)
	source := config(4)
	source.Source = []SourceConfig{{Path: []string{two}, Weight: 1}}
	for want, x := range map[string]struct {
		data Config
		eval EvalConfig
	}{
		"data.format":                    {data: config(4, two)},
		"format of this [[data.source]]": {data: source},
		"eval.format":                    {config(4, one), EvalConfig{Path: []string{two}}},
		"format of this [[eval.set]]":    {config(4, one), EvalConfig{Set: []EvalSetConfig{{"x", []string{two}, ""}}}},
	} {
		want = "b.jsonl:1: the record may be read as text or prompt; set " + want + " to one of them"
		data, err := Open(x.data, x.eval, Options{Vocab: 256})
		if err == nil {
			data.Close()
		}
		if err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A prompt and its completion have no template: the fault says how to write them if the one token
// of the completion begins in the prompt.
func TestCompletionInAToken(t *testing.T) {
	dir := t.TempDir()
	d := config(40, file(t, dir, "a.jsonl", `{"prompt": "Say: ", "completion": "the"}`+"\n"))
	d.Tokenizer = "../testdata/goldens/tokenizers/qwen2"
	_, err := Open(d, EvalConfig{}, Options{Vocab: 1 << 20})
	if want := "a.jsonl:1: no token is trained: each token with a trained byte has other bytes as well; " +
		"begin the completion with the white space that ends the prompt"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("%v", err)
	}
}
