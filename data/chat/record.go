package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Read reads a record. format is one of the constants; textField names the field of a text. The
// errors say what is wrong with the record, without its position.
func (r *Reader) Read(record []byte, format, textField string) (*Document, error) {
	object, err := fieldsOf(record)
	if err != nil {
		return nil, err
	}
	format, err = kindOf(object, format, textField)
	if err != nil {
		return nil, err
	}
	field := map[string]string{Text: textField, Messages: "messages", Conversations: "conversations", Prompt: "prompt",
		Tokens: "input_ids"}[format]
	if _, ok := object[field]; !ok {
		return nil, missing(object, field)
	}
	if err := checkCharacters(object, format, field); err != nil {
		return nil, err
	}
	switch format {
	case Text:
		text, err := stringField(object, field)
		if err != nil {
			return nil, fmt.Errorf("%w; set data.text_field to the field that has the text", err)
		}
		return &Document{Text: []byte(text), All: true, Marked: true}, nil
	case Tokens:
		return tokens(object)
	case Prompt:
		return r.prompt(object)
	}
	messages, err := messagesOf(object, format)
	if err != nil {
		return nil, err
	}
	return r.conversation(object, messages, 0, format == Conversations)
}

// Ask returns the text that a model continues as the assistant: a conversation with the generation
// prompt, as apply_chat_template of transformers renders it with add_generation_prompt. The prompt
// is what a user says, or a record with messages.
func (r *Reader) Ask(prompt []byte) ([]byte, error) {
	object, err := fieldsOf(prompt)
	if _, has := object[Messages]; !has {
		words, err := json.Marshal(
			[]map[string]string{{"role": "user", "content": strings.TrimSuffix(string(prompt), "\n")}})
		if err != nil {
			return nil, err
		}
		object = map[string]json.RawMessage{Messages: words}
	} else if err != nil {
		return nil, err
	}
	if err := checkCharacters(object, Messages, Messages); err != nil {
		return nil, err
	}
	messages, err := messagesOf(object, Messages)
	if err != nil {
		return nil, err
	}
	c, err := newConversation(object, messages, false)
	if err != nil {
		return nil, err
	}
	text, _, err := r.render(c, true)
	return []byte(text.S), err
}

// fieldsOf decodes a record.
func fieldsOf(record []byte) (object map[string]json.RawMessage, err error) {
	if err := json.Unmarshal(record, &object); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return nil, fmt.Errorf(
				"the line is not JSON at byte %d: %w; write each document as an object on a line of its own",
				syntax.Offset, err)
		}
		return nil, errors.New("the line is not a JSON object; write each document as an object on a line of its own")
	}
	return object, input.Once(record)
}

// checkCharacters refuses fields that are not UTF-8 or have half of a surrogate pair, in a record
// of a format whose texts are in a field.
func checkCharacters(object map[string]json.RawMessage, format, field string) error {
	for _, name := range slices.Sorted(maps.Keys(object)) {
		raw := object[name]
		if (format != Text || name == field) && !utf8.Valid(raw) {
			return fmt.Errorf("field %q is not UTF-8; convert the file to UTF-8", name)
		}
		if (name == field || format != Text && slices.Contains(Fields, name)) && hasLoneSurrogate(raw) {
			return fmt.Errorf("field %q %w", name, errLoneSurrogate)
		}
	}
	return nil
}

// messagesOf returns the messages of a record of the format Messages or Conversations.
func messagesOf(object map[string]json.RawMessage, format string) (messages []json.RawMessage, err error) {
	if err := json.Unmarshal(object[format], &messages); err != nil {
		fields := map[string]string{Messages: "role and content", Conversations: "from and value"}[format]
		return nil, fmt.Errorf("field %q is not a list of messages; write a list of objects with %s", format, fields)
	}
	return messages, nil
}

// kindOf returns the kind of a record. For Auto it is told by the fields.
func kindOf(object map[string]json.RawMessage, format, textField string) (string, error) {
	if format != Auto && format != "" {
		return format, nil
	}
	var kinds []string
	has := func(names ...string) bool {
		for _, n := range names {
			if raw, ok := object[n]; !ok || string(raw) == "null" {
				return false
			}
		}
		return true
	}
	if has(textField) && !(textField == "messages" || textField == "conversations") {
		kinds = append(kinds, Text)
	}
	list := func(name string) bool { raw := object[name]; return len(raw) > 0 && raw[0] == '[' }
	if list("messages") {
		kinds = append(kinds, Messages)
	}
	if list("conversations") {
		kinds = append(kinds, Conversations)
	}
	if has("prompt", "completion") {
		kinds = append(kinds, Prompt)
	}
	if list("input_ids") {
		kinds = append(kinds, Tokens)
	}
	if len(kinds) == 0 { // Read says that the field is not a list
		for _, name := range []string{Messages, Conversations} {
			if has(name) && textField != name {
				kinds = append(kinds, name)
			}
		}
	}
	switch len(kinds) {
	case 0:
		return Text, nil
	case 1:
		return kinds[0], nil
	}
	return "", &AmbiguousError{kinds}
}

// AmbiguousError is the error of a record that may be read as several kinds. Read needs the format
// then, for which the job file has a key for each list of files.
type AmbiguousError struct{ Kinds []string }

func (e *AmbiguousError) Error() string {
	return "the record may be read as " + strings.Join(e.Kinds, " or ")
}

func missing(object map[string]json.RawMessage, field string) error {
	if len(object) == 0 {
		return fmt.Errorf("the record is empty; write field %q, or remove the line", field)
	}
	var names []string
	for _, name := range slices.Sorted(maps.Keys(object)) {
		names = append(names, input.Quote(name))
	}
	return fmt.Errorf("there is no field %q among %s; set data.text_field, or write each line with prompt and completion, or with messages (docs/data.md)",
		field, strings.Join(names[:min(len(names), 12)], ", "))
}

func stringField(object map[string]json.RawMessage, name string) (string, error) {
	var s *string
	if err := json.Unmarshal(object[name], &s); err != nil || s == nil {
		return "", fmt.Errorf("field %q is not a string", name)
	}
	return *s, nil
}

// errLoneSurrogate follows the name of a field.
var errLoneSurrogate = errors.New(`has half of a surrogate pair (\ud800 to \udfff), which is no character; remove it`)

// hasLoneSurrogate reports whether JSON text has an escaped surrogate without its other half.
func hasLoneSurrogate(raw []byte) bool {
	for i := 0; i+5 < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		if raw[i+1] != 'u' {
			i++
			continue
		}
		switch half := surrogate(raw[i:]); {
		case half == 1 && surrogate(raw[i+6:]) == 2:
			i += 11
		case half != 0:
			return true
		}
	}
	return false
}

// surrogate returns 1 for the first half of a pair at the start of raw, 2 for the second, else 0.
func surrogate(raw []byte) int {
	if len(raw) < 6 || raw[0] != '\\' || raw[1] != 'u' || raw[2]|0x20 != 'd' {
		return 0
	}
	switch c := raw[3] | 0x20; {
	case c == '8'|0x20 || c == '9'|0x20 || c == 'a' || c == 'b':
		return 1
	case c >= 'c' && c <= 'f':
		return 2
	}
	return 0
}

// tokens reads input_ids, and labels of the same length if there are any.
func tokens(object map[string]json.RawMessage) (*Document, error) {
	d := &Document{}
	for _, x := range []struct {
		name string
		to   *[]int32
	}{{"input_ids", &d.IDs}, {"labels", &d.Labels}} {
		raw, ok := object[x.name]
		if !ok || string(raw) == "null" {
			continue
		}
		ids, ok := integers(raw)
		if !ok {
			return nil, fmt.Errorf("field %q is not a list of integers; write token ids", x.name)
		}
		*x.to = make([]int32, 0, len(ids)) // an empty list is not a field that is absent
		for i, id := range ids {
			if id > math.MaxInt32 || id < -100 {
				return nil, fmt.Errorf("%s, position %d: %d is not a token id", x.name, i, id)
			}
			*x.to = append(*x.to, int32(id))
		}
	}
	if err := oneDocument(object, len(d.IDs)); err != nil {
		return nil, err
	}
	if d.Labels == nil {
		d.Labels = d.IDs
	}
	if len(d.Labels) != len(d.IDs) {
		return nil, fmt.Errorf("input_ids has %d ids and labels %d; give both the same length", len(d.IDs),
			len(d.Labels))
	}
	return d, nil
}

// integers decodes a list of integers. json.Unmarshal decodes an element that is null as 0, which
// is a token id. Of the lists that it accepts, only those with a null have a letter.
func integers(raw json.RawMessage) (list []int64, ok bool) {
	err := json.Unmarshal(raw, &list)
	return list, err == nil && bytes.IndexByte(raw, 'n') < 0
}

// oneDocument returns an error if a field beside input_ids leaves tokens out of the attention or of
// the loss, or divides them into several documents.
func oneDocument(object map[string]json.RawMessage, tokens int) error {
	for _, name := range besideTokens {
		raw, ok := object[name]
		if !ok || string(raw) == "null" {
			continue
		}
		values, ok := integers(raw)
		if !ok {
			return fmt.Errorf("field %q is not a list of integers; remove it", name)
		}
		if want := oneValue(name, tokens); len(values) != want {
			return fmt.Errorf("%s has %d values for %d ids; write %d, or leave the field out", name, len(values),
				tokens, want)
		}
		for i, v := range values {
			switch {
			case name == "position_ids" && v != int64(i):
				return fmt.Errorf(
					"position_ids, position %d: %d, and only one document from position 0 on is supported; write each document as a record",
					i, v)
			case name == "seq_lengths" && v != int64(tokens):
				return fmt.Errorf("seq_lengths has a document of %d of %d tokens; write each document as a record",
					v, tokens)
			case strings.Contains(name, "mask") && v != 1:
				return fmt.Errorf(
					"%s, position %d: %d, and only 1 is supported; leave padding out, and write labels with -100 for tokens without a loss",
					name, i, v)
			}
		}
	}
	return nil
}

// oneValue returns how many values a field beside input_ids has if these are one document.
func oneValue(name string, tokens int) int {
	if name == "seq_lengths" {
		return 1
	}
	return tokens
}

// prompt reads a prompt and its completion: two strings, or two lists of messages.
func (r *Reader) prompt(object map[string]json.RawMessage) (*Document, error) {
	if _, ok := object["completion"]; !ok {
		return nil, errors.New(`there is a "prompt" and no "completion"; write both`)
	}
	var first, second []json.RawMessage
	if json.Unmarshal(object["prompt"], &first) == nil && json.Unmarshal(object["completion"], &second) == nil {
		return r.conversation(object, append(first, second...), len(first), false)
	}
	prompt, err := stringField(object, "prompt")
	if err != nil {
		return nil, fmt.Errorf("%w; write prompt and completion as two strings, or as two lists of messages", err)
	}
	completion, err := stringField(object, "completion")
	if err != nil {
		return nil, fmt.Errorf("%w; write prompt and completion as two strings, or as two lists of messages", err)
	}
	if completion == "" {
		return nil, errors.New("the completion is empty; remove the record")
	}
	d := &Document{Text: []byte(prompt + completion), All: r.TrainOn == All, Marked: true}
	d.Trained = []Range{{len(prompt), len(d.Text)}}
	return d, nil
}

// conversation reads and renders messages. The first ones, a prompt, are not trained.
func (r *Reader) conversation(object map[string]json.RawMessage, messages []json.RawMessage, prompt int,
	shareGPT bool) (*Document, error) {
	c, err := newConversation(object, messages, shareGPT)
	if err != nil {
		return nil, err
	}
	trains := false
	for i := range c.trains {
		c.trains[i] = c.trains[i] && i >= prompt && (r.TrainOn != Last || i == c.last)
		trains = trains || c.trains[i]
	}
	if !trains && r.TrainOn != All {
		return nil, errors.New(
			"no message of an assistant is trained; remove the record, or set data.train_on = \"all\"")
	}
	text, t, err := r.render(c, false)
	if err != nil {
		return nil, err
	}
	d := &Document{Text: []byte(text.S), All: r.TrainOn == All}
	if !d.All {
		if d.Trained = r.trained(c, t, text); len(d.Trained) == 0 {
			return nil, status.Errorf(status.InvalidConfig,
				"%s shows nothing that an assistant wrote; remove the record, or use another template", t.path)
		}
	}
	return d, nil
}
