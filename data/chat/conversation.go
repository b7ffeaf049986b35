package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"ulysses/data/chat/jinja"
	"ulysses/internal/input"
)

// conversation is the messages of a record. Texts of message i have the mark i+1.
type conversation struct {
	messages         *jinja.List
	given            *jinja.List // the messages with arguments in strings, if the record has such
	tools, documents jinja.Value
	kwargs           *jinja.Dict
	kwargsText       string // kwargs in JSON
	bytes            int    // of the record
	trains           []bool // by message: it is an assistant's, and the record does not exclude it
	last             int    // the last message of an assistant; 0 = the first one, or none
	shown            []bool // by message: it has text, so the rendering must have it
	hasParts         bool   // a content is a list of parts
}

// roles are the roles of messages. Templates drop unknown roles silently, or raise.
var roles = []string{"system", "developer", "user", "assistant", "tool", "function", "ipython"}

// shareGPT has the roles of messages in ShareGPT's form.
var shareGPT = map[string]string{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
	"system": "system", "tool": "tool", "observation": "tool"}

// reasoning has the names under which messages have an assistant's reasoning.
var reasoning = []string{"reasoning_content", "thinking", "reasoning"}

// besideMessages has fields of other formats beside the messages, and what to write instead.
var besideMessages = []struct{ field, instead string }{{"system", "write it as the first message, of the role system"},
	{"functions", "write them as tools"}}

func newConversation(object map[string]json.RawMessage, messages []json.RawMessage,
	fromShareGPT bool) (*conversation, error) {
	if len(messages) == 0 {
		return nil, errors.New("the conversation is empty; remove the record")
	}
	for _, x := range besideMessages {
		v, _ := jinja.FromJSON(object[x.field], 0, maxDepth)
		t, _ := v.(jinja.Text)
		if l, ok := v.(*jinja.List); ok && len(l.Items) > 0 || strings.TrimSpace(t.S) != "" {
			return nil, fmt.Errorf("field %q is not read; %s", x.field, x.instead)
		}
	}
	c := &conversation{messages: &jinja.List{}, trains: make([]bool, len(messages)), shown: make([]bool, len(messages))}
	for _, raw := range object {
		c.bytes += len(raw)
	}
	for i, raw := range messages {
		m, err := c.message(i, raw, fromShareGPT)
		if err != nil {
			return nil, fmt.Errorf("message %d %w", i, err)
		}
		c.messages.Items = append(c.messages.Items, m)
	}
	c.decodeArguments()
	for _, x := range []struct {
		name string
		to   *jinja.Value
	}{{"tools", &c.tools}, {"documents", &c.documents}} {
		v, err := decoded(object[x.name])
		if err != nil {
			return nil, fmt.Errorf("field %q %w", x.name, err)
		}
		if l, ok := v.(*jinja.List); v != nil && (!ok || len(l.Items) == 0 && x.name == "tools") {
			if !ok {
				return nil, fmt.Errorf("field %q is not a list", x.name)
			}
			v = nil
		}
		*x.to = v
	}
	v, err := decoded(object["chat_template_kwargs"])
	if err != nil {
		return nil, fmt.Errorf("field \"chat_template_kwargs\" %w", err)
	}
	d, ok := v.(*jinja.Dict)
	if !ok && v != nil {
		return nil, errors.New(`field "chat_template_kwargs" is not an object`)
	}
	if ok {
		c.kwargs, c.kwargsText = d, string(object["chat_template_kwargs"])
		d.Each(func(name string, _ jinja.Value) {
			if why := checkName(name); why != nil && err == nil {
				err = fmt.Errorf("field \"chat_template_kwargs\": %s is %w", name, why)
			}
		})
	}
	return c, err
}

// decoded decodes a field; a string that is a list or an object in JSON is decoded again. The
// errors follow the name of the field.
func decoded(raw json.RawMessage) (jinja.Value, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	v, err := jinja.FromJSON(raw, 0, maxDepth)
	if err != nil {
		return nil, fmt.Errorf("cannot be read: %w", err)
	}
	t, ok := v.(jinja.Text)
	switch {
	case !ok:
		return v, nil
	case strings.TrimSpace(t.S) == "":
		return nil, nil
	case hasLoneSurrogate([]byte(t.S)):
		return nil, errLoneSurrogate
	}
	if v, err = jinja.FromJSON([]byte(t.S), 0, maxDepth); err != nil {
		return nil, fmt.Errorf("is a string that is not JSON (%w); write the value itself, or all of its JSON", err)
	}
	return v, nil
}

// message decodes a message. The errors follow the words "message 3".
func (c *conversation) message(i int, raw json.RawMessage, fromShareGPT bool) (*jinja.Dict, error) {
	mark := jinja.Mark(i + 1)
	v, err := jinja.FromJSON(raw, mark, maxDepth)
	if err != nil {
		return nil, fmt.Errorf("cannot be read: %w", err)
	}
	given, ok := v.(*jinja.Dict)
	if !ok {
		return nil, errors.New("is not an object; write {\"role\": …, \"content\": …}")
	}
	role, content := "role", "content"
	if _, has := given.Get("from"); fromShareGPT && has {
		role, content = "from", "value"
	}
	name, err := roleOf(given, role, fromShareGPT)
	if err != nil {
		return nil, err
	}
	m := jinja.NewDict()
	m.Set("role", jinja.Text{S: name})
	trains := name == "assistant"
	given.Each(func(k string, v jinja.Value) {
		switch {
		case v == nil || k == role: // templates expect that a key that is null is absent
		case k == "name" || k == "tool_call_id":
			m.Set(k, unmarked(v))
		case k == "train" || k == "weight":
			on, e := flag(k, v)
			if e != nil {
				err = e
			}
			trains = trains && on
		case k == "train_detail":
			err = errors.New("has train_detail, and only whole messages can be left out; use train or weight")
		case k == content:
			m.Set("content", v)
		default:
			m.Set(k, v)
		}
	})
	if err != nil {
		return nil, err
	}
	return m, c.check(i, name, alias(m), trains)
}

// roleOf returns the role of a message.
func roleOf(m *jinja.Dict, key string, fromShareGPT bool) (string, error) {
	v, _ := m.Get(key)
	t, ok := v.(jinja.Text)
	if !ok {
		var keys []string
		m.Each(func(k string, _ jinja.Value) { keys = append(keys, input.Quote(k)) })
		return "", fmt.Errorf("has no %s among %s; write the role of each message", key,
			strings.Join(keys[:min(len(keys), 12)], ", "))
	}
	name, known := t.S, slices.Contains(roles, t.S)
	if fromShareGPT {
		if name, known = shareGPT[t.S]; !known {
			return "", fmt.Errorf("is from %s; use human, gpt, system, tool or observation", input.Quote(t.S))
		}
	}
	if !known {
		return "", fmt.Errorf("has the role %s; use one of %s", input.Quote(t.S), strings.Join(roles, ", "))
	}
	return name, nil
}

// flag reads "train": true or false, or "weight": 1 or 0.
func flag(name string, v jinja.Value) (bool, error) {
	switch {
	case v == true || v == int64(1) || v == 1.0:
		return true, nil
	case v == false || v == int64(0) || v == 0.0:
		return false, nil
	}
	return false, fmt.Errorf("has another %s than 0 and 1; write 1 to train the message and 0 not to", name)
}

func unmarked(v jinja.Value) jinja.Value {
	if t, ok := v.(jinja.Text); ok {
		return jinja.Text{S: t.S}
	}
	return v
}

// decodeArguments makes the arguments of tool calls objects. APIs give them as JSON in a string,
// and most templates write them with tojson. The others get the strings of the record.
func (c *conversation) decodeArguments() {
	given, decoded := c.messages, &jinja.List{}
	for i, x := range given.Items {
		m := jinja.NewDict()
		x.(*jinja.Dict).Each(func(k string, v jinja.Value) {
			if k == "tool_calls" {
				v = c.calls(v, given, jinja.Mark(i+1))
			}
			m.Set(k, v)
		})
		decoded.Items = append(decoded.Items, m)
	}
	c.messages = decoded
}

// calls returns tool calls whose arguments are objects. If some were strings, it keeps the messages
// given.
func (c *conversation) calls(v jinja.Value, given *jinja.List, mark jinja.Mark) jinja.Value {
	l, ok := v.(*jinja.List)
	if !ok {
		return v
	}
	out := &jinja.List{}
	for _, x := range l.Items {
		if d, ok := x.(*jinja.Dict); ok {
			x = c.withArguments(d, given, mark)
		}
		out.Items = append(out.Items, x)
	}
	return out
}

// withArguments is calls for a tool call, or its function.
func (c *conversation) withArguments(d *jinja.Dict, given *jinja.List, mark jinja.Mark) *jinja.Dict {
	out := jinja.NewDict()
	d.Each(func(k string, v jinja.Value) {
		if f, ok := v.(*jinja.Dict); ok && k == "function" {
			v = c.withArguments(f, given, mark)
		} else if t, ok := v.(jinja.Text); ok && k == "arguments" && !hasLoneSurrogate([]byte(t.S)) {
			if o, err := jinja.FromJSON([]byte(t.S), mark, maxDepth); err == nil {
				if _, isObject := o.(*jinja.Dict); isObject {
					v, c.given = o, given
				}
			}
		}
		if v != nil {
			out.Set(k, v)
		}
	})
	return out
}

// alias gives an assistant's reasoning the names that templates read.
func alias(m *jinja.Dict) *jinja.Dict {
	for _, name := range reasoning {
		if v, ok := m.Get(name); ok {
			m.Set("reasoning_content", v)
			if _, has := m.Get("thinking"); !has {
				m.Set("thinking", v)
			}
			break
		}
	}
	return m
}

// check checks a message and records what is known of it.
func (c *conversation) check(i int, role string, m *jinja.Dict, trains bool) error {
	content, _ := m.Get("content")
	text := ""
	switch v := content.(type) {
	case nil:
	case jinja.Text:
		text = v.S
	case *jinja.List:
		c.hasParts = true
		joined, err := joinParts(v)
		if err != nil {
			return err
		}
		text = joined.S
	default:
		return errors.New("has a content that is neither a string nor a list of texts; write a string")
	}
	c.shown[i] = strings.TrimSpace(text) != ""
	if calls, ok := m.Get("tool_calls"); ok {
		l, isList := calls.(*jinja.List)
		if !isList {
			return errors.New("has tool_calls that are not a list")
		}
		c.shown[i] = c.shown[i] || len(l.Items) > 0
	}
	if _, ok := m.Get("reasoning_content"); !c.shown[i] && !ok && (role == "user" || role == "assistant") {
		return fmt.Errorf("of the %s is empty; remove it, or the record", role)
	}
	if c.trains[i] = trains; role == "assistant" {
		c.last = i
	}
	return nil
}

// joinParts returns the text of a content that is a list of parts.
func joinParts(l *jinja.List) (jinja.Text, error) {
	var out jinja.Text
	for _, part := range l.Items {
		d, ok := part.(*jinja.Dict)
		if !ok {
			if t, ok := part.(jinja.Text); ok {
				out = out.Append(t)
				continue
			}
			return out, errors.New(
				"has a part that is neither a string nor an object; write {\"type\": \"text\", \"text\": …}")
		}
		for _, key := range []string{"train", "weight"} {
			if v, _ := d.Get(key); v != nil {
				return out,
					fmt.Errorf("has a part with %s, and only whole messages can be left out; write %s in the message",
						key, key)
			}
		}
		t, ok := d.Get("text")
		s, isText := t.(jinja.Text)
		if !ok || !isText {
			kind, _ := d.Get("type")
			name, _ := kind.(jinja.Text)
			return out, fmt.Errorf("has a part of type %s, and only text is supported; remove the part",
				input.Quote(name.S))
		}
		out = out.Append(s)
	}
	return out, nil
}

// joinedParts returns messages with contents that are strings.
func joinedParts(messages *jinja.List) (*jinja.List, error) {
	out := &jinja.List{}
	for _, x := range messages.Items {
		m := jinja.NewDict()
		var err error
		x.(*jinja.Dict).Each(func(k string, v jinja.Value) {
			if l, ok := v.(*jinja.List); ok && k == "content" {
				v, err = joinParts(l)
			}
			m.Set(k, v)
		})
		if err != nil {
			return nil, err
		}
		out.Items = append(out.Items, m)
	}
	return out, nil
}

// allShown returns an error if the rendering leaves out a message that has text.
func (c *conversation) allShown(text jinja.Text, t *template) error {
	seen := make([]bool, len(c.shown))
	for _, x := range turnsOf(text, t) {
		if x.message >= 0 {
			seen[x.message] = true
		}
	}
	for i, has := range c.shown {
		if has && !seen[i] {
			role, _ := c.messages.Items[i].(*jinja.Dict).Get("role")
			return fmt.Errorf(
				"the template leaves out message %d, of the role %s; remove the message, or use another template", i,
				input.Quote(role.(jinja.Text).S))
		}
	}
	return nil
}
