// Package chat turns records of conversations and instructions into texts, and says which bytes of
// a text are trained.
//
// Open reads a model's chat templates and returns a Reader. Reader.Read reads one JSON object: a
// conversation in OpenAI's form (messages) or ShareGPT's (conversations), a prompt with its
// completion, or token ids with labels. Package data calls it for each line of a file.
//
// A conversation is rendered once, as apply_chat_template of transformers renders it. Each byte of
// the rendering is from a message or from the template (package jinja). The bytes that an assistant
// writes are trained: from the end of the generation prompt to the special token that ends the
// turn. If the template has the tag generation, its output is trained instead.
package chat

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"ulysses/data/chat/jinja"
	"ulysses/internal/status"
)

// The values of data.format: the kinds of records. Auto takes the kind from the fields of each
// record.
const (
	Auto          = "auto"
	Text          = "text"
	Messages      = "messages"
	Conversations = "conversations"
	Prompt        = "prompt"
	Tokens        = "tokens"
)

// Fields are the fields of records that Read reads, without the field of a text.
var Fields = append([]string{"messages", "conversations", "prompt", "completion", "input_ids", "labels", "tools",
	"documents", "chat_template_kwargs", "system", "functions"}, besideTokens...)

// besideTokens are fields that other trainers write beside input_ids. A record is refused if they
// say that it is not one document, or that some of its tokens are not trained.
var besideTokens = []string{"attention_mask", "completion_mask", "assistant_masks", "loss_mask", "position_ids",
	"seq_lengths"}

// The values of data.train_on.
const (
	Assistant = "assistant" // what assistants write
	Last      = "last"      // what the assistant writes last
	All       = "all"       // everything
)

// Key is the key of a job that names chat templates.
const Key = "data.chat_template"

// Options are the arguments of Open.
type Options struct {
	Template string   // a .jinja file, or a folder with templates
	Key      string   // the key of a job that names Template, for errors; "" = none
	Folder   string   // of the tokenizer; its files name the special tokens
	TrainOn  string   // Assistant, Last or All
	Special  []string // special tokens of the tokenizer
	Date     string   // what strftime_now shows, as 2006-01-02; "" = a template that asks is refused
	// that templates see
	Variables Variables
}

// Range is bytes [Lo, Hi) of a text.
type Range struct{ Lo, Hi int }

// Document is a record. A record of kind Tokens has IDs, and Labels of the same length; others have
// a Text.
type Document struct {
	Text        []byte
	Trained     []Range // ascending; bytes that are trained
	All         bool    // everything is trained
	Marked      bool    // the tokenizer's marks are around the text; the end mark is trained
	IDs, Labels []int32
}

// Reader reads records. Several goroutines may use it at the same time.
type Reader struct {
	Options
	templates map[string]*template
	files     []string
	digest    string
	variables *jinja.Dict // special tokens and Options.Variables by name
	probed    probes
	now       func() time.Time
}

// template is a chat template, and how it begins and ends the turns of assistants.
type template struct {
	*jinja.Template
	path string
	err  error // of a file that is not a template
	// The beginnings of the generation prompt by which the turn of an assistant is found, the
	// longest first. A template without generation prompt has none.
	headers []string
	lead    string   // a special token with which the turns of all roles begin; "" = none
	between int      // without headers: special tokens between the text of a user and a plain answer
	ends    []string // special tokens behind a plain text of an assistant
}

// HasTemplates reports whether there is a chat template.
func (r *Reader) HasTemplates() bool { return len(r.templates) > 0 }

// Files returns the paths of the files that were read.
func (r *Reader) Files() []string { return r.files }

// Digest differs for templates and options that give other texts or other trained bytes.
func (r *Reader) Digest() string { return r.digest }

// maxDepth limits the nesting of a record.
const maxDepth = 64

// render renders a conversation, with the generation prompt if prompt is set. It returns what each
// byte is from.
func (r *Reader) render(c *conversation, prompt bool) (jinja.Text, *template, error) {
	t, err := r.choose(c)
	if err != nil {
		return jinja.Text{}, nil, err
	}
	t = r.turnsOf(t, c)
	out, err := r.renderForm(t, c, c.messages, prompt)
	if err != nil && c.given != nil {
		// Templates that join arguments to strings, such as DeepSeek R1's, expect strings.
		if given, e := r.renderForm(t, c, c.given, prompt); e == nil {
			return given, t, nil
		}
	}
	return out, t, err
}

// renderForm renders messages whose tool calls have arguments in one form, objects or strings.
func (r *Reader) renderForm(t *template, c *conversation, messages *jinja.List, prompt bool) (jinja.Text, error) {
	out, err := r.renderWith(t, c, messages, prompt)
	if err == nil {
		err = c.allShown(out, t)
	}
	if err != nil && c.hasParts {
		// Templates of text models expect strings. The ones that read lists of parts have shown
		// them.
		joined, e := joinedParts(messages)
		if e != nil {
			return out, e
		}
		if out, err = r.renderWith(t, c, joined, prompt); err == nil {
			err = c.allShown(out, t)
		}
	}
	return out, err
}

func (r *Reader) renderWith(t *template, c *conversation, messages *jinja.List, prompt bool) (jinja.Text, error) {
	vars := jinja.NewDict()
	r.variables.Each(vars.Set)
	vars.Set("messages", messages)
	vars.Set("tools", c.tools)
	vars.Set("documents", c.documents)
	vars.Set("add_generation_prompt", prompt)
	if c.kwargs != nil {
		c.kwargs.Each(vars.Set)
	}
	out, err := t.Render(vars, r.now, jinja.DefaultLimits(c.bytes))
	if err != nil {
		text := err.Error()
		if t.Reads("strftime_now") && r.now == nil {
			text += `; set data.chat_date = "2026-01-31", the date that the template shows`
		}
		return out, status.Errorf(status.InvalidConfig, "%s: %s", t.path, text)
	}
	return out, nil
}

// choose returns the template for a conversation: tool_use if it has tools and there is one.
func (r *Reader) choose(c *conversation) (*template, error) {
	name := "default"
	if _, has := r.templates["tool_use"]; has && c.tools != nil {
		name = "tool_use"
	}
	if t := r.templates[name]; t != nil {
		return t, t.err
	}
	if len(r.templates) > 0 {
		return nil, fmt.Errorf("%s has no template named default%s", r.Template, r.fix("a .jinja file"))
	}
	return nil, fmt.Errorf("there is no chat template%s",
		r.fix("a .jinja file, or to a folder with chat_template.jinja"))
}

// probes has templates that were probed with the variables of records.
type probes struct {
	lock sync.Mutex
	by   map[probeKey]*template
}

type probeKey struct {
	of     *template
	kwargs string // JSON
}

// maxProbes limits the templates in memory. Records may each have a variable of their own.
const maxProbes = 256

// turnsOf returns the template with its turns for the record's own variables, on which the
// generation prompt depends.
func (r *Reader) turnsOf(t *template, c *conversation) *template {
	if c.kwargs == nil || c.kwargs.Len() == 0 {
		return t
	}
	key := probeKey{t, c.kwargsText}
	r.probed.lock.Lock()
	own := r.probed.by[key]
	r.probed.lock.Unlock()
	if own != nil {
		return own
	}
	own = &template{Template: t.Template, path: t.path}
	r.probe(own, c.kwargs)
	if len(own.headers) == 0 { // the template does not render plain messages with these variables
		own = t
	}
	r.probed.lock.Lock()
	defer r.probed.lock.Unlock()
	if r.probed.by == nil {
		r.probed.by = map[probeKey]*template{}
	}
	if len(r.probed.by) < maxProbes {
		r.probed.by[key] = own
	}
	return own
}

// The marks of the texts of probe.
const (
	probedAssistant jinja.Mark = 1 + iota
	probedUser
)

// probe finds out how a template begins and ends the turns of assistants, with the variables of a
// record.
func (r *Reader) probe(t *template, kwargs *jinja.Dict) {
	message := func(role string, mark jinja.Mark) jinja.Value {
		m := jinja.NewDict()
		m.Set("role", jinja.Text{S: role})
		m.Set("content", jinja.NewText("x", mark))
		return m
	}
	user, assistant := message("user", probedUser), message("assistant", probedAssistant)
	c := &conversation{kwargs: kwargs}
	render := func(prompt bool, messages ...jinja.Value) jinja.Text {
		text, err := r.renderWith(t, c, &jinja.List{Items: messages}, prompt)
		if err != nil {
			return jinja.Text{}
		}
		return text
	}
	without := render(false, user)
	if without.S == "" { // some templates are for conversations with tools alone
		c.tools = &jinja.List{Items: []jinja.Value{probeTool()}}
		without = render(false, user)
	}
	prompt, ok := strings.CutPrefix(render(true, user).S, without.S)
	if ok && prompt == "" { // the first one of Llama 3 ends with the generation prompt always
		without.S, prompt = r.cutPrompt(without, render(false, user, assistant))
	}
	for n := len(prompt); ok && n > 0; n-- {
		h := prompt[:n]
		special := slices.ContainsFunc(r.Special, func(s string) bool { return strings.HasSuffix(h, s) })
		switch {
		case n < len(prompt) && h[n-1] != '\n' && !special:
		case !strings.Contains(without.S, h):
			t.headers = append(t.headers, h)
		case special && t.lead == "":
			t.lead = h // turns of users begin with it as well
		}
	}
	if len(t.headers) == 0 {
		t.lead = ""
		t.between = len(endsOf(textBetween(render(false, user, assistant)), r.Special))
	}
	text := render(false, user, assistant, user, assistant)
	text.Runs(func(_, hi int, mark jinja.Mark) {
		if mark&^jinja.Generated == probedAssistant {
			if end := endOf(text.S, hi, len(text.S), r.endTokens(t)); end > hi {
				for _, s := range r.Special {
					if strings.HasSuffix(text.S[:end], s) && !slices.Contains(t.ends, s) {
						t.ends = append(t.ends, s)
					}
				}
			}
		}
	})
}

// textBetween returns the text of the template between a text of the user and an answer.
func textBetween(text jinja.Text) string {
	asked, answer := userEnd(text), answerStart(text)
	if answer < asked {
		return ""
	}
	return text.S[asked:answer]
}

// userEnd returns the end of the last text of the user in a rendering of probe; 0 = there is none.
func userEnd(text jinja.Text) (end int) {
	text.Runs(func(_, hi int, mark jinja.Mark) {
		if mark&^jinja.Generated == probedUser {
			end = hi
		}
	})
	return end
}

// answerStart returns the start of the first answer in a rendering of probe; -1 = there is none.
func answerStart(text jinja.Text) int {
	start := -1
	text.Runs(func(lo, _ int, mark jinja.Mark) {
		if start < 0 && mark&^jinja.Generated == probedAssistant {
			start = lo
		}
	})
	return start
}

// cutPrompt cuts the generation prompt off a rendering that ends with a text of the user: what
// follows the token that ends the user's turn. The prompt is empty if no special token begins a
// turn there, or if the answer of an assistant does not follow directly in the other rendering.
func (r *Reader) cutPrompt(asked, answered jinja.Text) (without, prompt string) {
	at := endOf(asked.S, userEnd(asked), len(asked.S), r.Special)
	prompt = asked.S[at:]
	turn := slices.ContainsFunc(r.Special, func(s string) bool { return strings.Contains(prompt, s) })
	if !turn || answerStart(answered) != len(asked.S) || !strings.HasPrefix(answered.S, asked.S) {
		return asked.S, ""
	}
	return asked.S[:at], prompt
}

// probeTool returns a tool for templates that do not render conversations without tools.
func probeTool() jinja.Value {
	dict := func(pairs ...any) *jinja.Dict {
		d := jinja.NewDict()
		for i := 0; i < len(pairs); i += 2 {
			d.Set(pairs[i].(string), pairs[i+1])
		}
		return d
	}
	x := jinja.Text{S: "x"}
	parameters := dict("type", jinja.Text{S: "object"}, "properties", dict(), "required", &jinja.List{})
	function := dict("name", x, "description", x, "parameters", parameters)
	return dict("type", jinja.Text{S: "function"}, "function", function)
}
