package chat

import (
	"errors"
	"fmt"
	"hash"
	"maps"
	"math"
	"slices"
	"time"

	"ulysses/data/chat/jinja"
	"ulysses/internal/status"
)

// Variables are values that all chat templates of a job see by their names, as the further
// arguments of apply_chat_template in transformers: a string, bool, int64, float64, or []any of
// these. A value in chat_template_kwargs of a record takes its place.
type Variables map[string]any

// reserved says for the names that are no variables where templates have them from.
var reserved = func() map[string]string {
	names := map[string]string{
		"raise_exception": "it is a function of templates",
		"strftime_now":    "it is a function of templates, which data.chat_date sets",
	}
	for _, name := range []string{"messages", "tools", "documents"} {
		names[name] = "each record has its own"
	}
	for _, name := range tokenNames {
		names[name] = "the files of the tokenizer have it"
	}
	for _, name := range []string{"add_generation_prompt", "continue_final_message"} {
		names[name] = "the text of a record has no generation prompt"
	}
	for _, name := range []string{"conversation", "conversations", "chat_template", "tokenize",
		"sanitize_control_tokens", "padding", "truncation", "max_length",
		"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"} {
		names[name] = "it is an argument of apply_chat_template that templates do not see"
	}
	return names
}()

// CheckVariable returns an error for a variable that templates cannot have. The error follows the
// name.
func CheckVariable(name string, value any) error {
	_, err := variable(name, value)
	return err
}

// checkName returns an error for a name that templates have from elsewhere. The error follows the
// name.
func checkName(name string) error {
	if why, ok := reserved[name]; ok {
		return fmt.Errorf("not a variable, because %s; remove it", why)
	}
	return nil
}

func variable(name string, value any) (jinja.Value, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	return templateValue(value)
}

// templateValue returns a value of a job file as a value of templates.
func templateValue(value any) (jinja.Value, error) {
	switch x := value.(type) {
	case string:
		return jinja.Text{S: x}, nil
	case float64:
		if !math.IsNaN(x) && !math.IsInf(x, 0) {
			return x, nil
		}
		return nil, fmt.Errorf("%v is not a finite number; write one, or a string", x)
	case bool, int64:
		return x, nil
	case []any:
		l := &jinja.List{}
		for _, item := range x {
			v, err := templateValue(item)
			if err != nil {
				return nil, err
			}
			l.Items = append(l.Items, v)
		}
		return l, nil
	case time.Time:
		return nil, errors.New("a date; write it as a string")
	}
	return nil, errors.New("a table; write a string, a number, true, false, or a list of these")
}

// setVariables adds the job's variables to the ones of templates, and to a digest. A variable that
// no template reads is an error: its name is wrong, and the texts are not the expected ones.
func (r *Reader) setVariables(digest hash.Hash) error {
	read, parsed := map[string]bool{}, false
	for _, t := range r.templates {
		if t.err != nil {
			continue
		}
		parsed = true
		for name := range r.Options.Variables {
			read[name] = read[name] || t.Reads(name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Options.Variables)) {
		v, err := variable(name, r.Options.Variables[name])
		if err == nil && parsed && !read[name] {
			err = fmt.Errorf("%s does not read it; remove it, or correct the name", r.Template)
		}
		if err != nil {
			return status.Errorf(status.InvalidConfig, "data.chat_variables.%s: %w", name, err)
		}
		r.variables.Set(name, v)
		fmt.Fprintf(digest, "%s = %s\n", name, jinja.Repr(v))
	}
	return nil
}
