package chat

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"ulysses/data/chat/jinja"
	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Open reads the chat templates that o.Template names. It succeeds without a template, and Read
// refuses conversations then. As in transformers, the files chat_template.jinja and
// additional_chat_templates/NAME.jinja come before chat_template of tokenizer_config.json, which is
// a string, a list of objects with name and template, or an object of strings by name. The last is
// chat_template.json, in which multimodal models have it.
func Open(o Options) (*Reader, error) {
	r := &Reader{Options: o, templates: map[string]*template{}, variables: jinja.NewDict()}
	if o.Date != "" {
		date, err := time.Parse(time.DateOnly, o.Date)
		if err != nil {
			return nil, status.Errorf(status.InvalidConfig, "data.chat_date = %q: a date such as 2026-01-31 is needed",
				o.Date)
		}
		r.now = func() time.Time { return date }
	}
	sources, err := r.find()
	if err != nil {
		return nil, r.named(err)
	}
	if err := r.specialTokens(); err != nil {
		return nil, r.named(err)
	}
	sum := sha256.New()
	names := make([]string, 0, len(sources))
	for name := range sources {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		s := sources[name]
		t, err := jinja.Parse(s.text)
		if err != nil { // only conversations need the template
			err = r.named(status.Errorf(status.Unsupported, "%s: %w%s", s.path, err, r.fix("another template")))
		}
		r.templates[name] = &template{Template: t, path: s.path, err: err}
		fmt.Fprintf(sum, "%s %d %s", name, len(s.text), s.text)
	}
	fmt.Fprintf(sum, "%s %s %q", o.TrainOn, o.Date, o.Special)
	r.variables.Each(func(k string, v jinja.Value) { fmt.Fprintf(sum, "%s %v", k, v) })
	if err := r.setVariables(sum); err != nil {
		return nil, err
	}
	r.digest = hex.EncodeToString(sum.Sum(nil))
	for _, t := range r.templates {
		if t.err == nil {
			r.probe(t, nil)
		}
	}
	return r, nil
}

// Texts returns the texts of the templates of a .jinja file or a folder by name. The name of the
// template of a file is default.
func Texts(path string) (map[string]string, error) {
	r := &Reader{Options: Options{Template: path, Key: Key}}
	found, err := r.find()
	texts := map[string]string{}
	for name, s := range found {
		texts[name] = s.text
	}
	return texts, r.named(err)
}

// named returns err with the key of a job that names the templates before it, if there is one.
func (r *Reader) named(err error) error {
	if err == nil || r.Key == "" {
		return err
	}
	return status.Errorf(status.Of(err), "%s: %w", r.Key, err)
}

// fix returns the end of an error: to what the key of a job must be set.
func (r *Reader) fix(to string) string {
	if r.Key == "" {
		return ""
	}
	return fmt.Sprintf("; set %s to %s", r.Key, to)
}

// source is the text of a template.
type source struct{ path, text string }

// find returns the templates by name.
func (r *Reader) find() (map[string]source, error) {
	found := map[string]source{}
	if r.Template == "" {
		return found, nil
	}
	info, err := os.Stat(r.Template)
	if err != nil {
		return nil, status.Errorf(status.IO, "%w", err)
	}
	if !info.IsDir() {
		text, err := r.read(r.Template)
		found["default"] = source{r.Template, text}
		return found, err
	}
	paths := input.Match(filepath.Join(r.Template, "additional_chat_templates"), "*.jinja")
	for _, path := range append(paths, filepath.Join(r.Template, "chat_template.jinja")) {
		text, err := r.read(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		name := strings.TrimSuffix(filepath.Base(path), ".jinja")
		if filepath.Dir(path) == filepath.Clean(r.Template) {
			name = "default"
		}
		found[name] = source{path, text}
	}
	if len(found) > 0 {
		return found, nil
	}
	for _, name := range []string{"tokenizer_config.json", "chat_template.json"} {
		if found, err = r.fromJSON(filepath.Join(r.Template, name)); err != nil || len(found) > 0 {
			return found, err
		}
	}
	return found, nil
}

// fromJSON returns the templates of a file with the field chat_template.
func (r *Reader) fromJSON(path string) (map[string]source, error) {
	found := map[string]source{}
	text, err := r.read(path)
	if errors.Is(err, fs.ErrNotExist) {
		return found, nil
	} else if err != nil {
		return nil, err
	}
	var config struct {
		Template json.RawMessage `json:"chat_template"`
	}
	if err := input.JSON([]byte(text), &config); err != nil {
		return nil, status.Errorf(status.InvalidConfig, "%s: %w", path, err)
	}
	var one string
	var several []struct{ Name, Template string }
	var named map[string]string
	switch {
	case len(config.Template) == 0 || string(config.Template) == "null":
	case json.Unmarshal(config.Template, &one) == nil:
		found["default"] = source{path, one}
	case json.Unmarshal(config.Template, &several) == nil:
		for _, t := range several {
			found[t.Name] = source{path + " (" + t.Name + ")", t.Template}
		}
	case json.Unmarshal(config.Template, &named) == nil:
		for name, text := range named {
			found[name] = source{path + " (" + name + ")", text}
		}
	default:
		return nil, status.Errorf(status.InvalidConfig,
			"%s: chat_template is neither a string nor a list of objects with name and template, nor an object of strings",
			path)
	}
	for name := range found { // a saved model has a file of this name
		if name != filepath.Base(name) || !filepath.IsLocal(name) {
			return nil, status.Errorf(status.InvalidConfig,
				"%s: a template has the name %s, which cannot be the name of a file; rename it", path,
				input.Quote(name))
		}
	}
	return found, nil
}

func (r *Reader) read(path string) (string, error) {
	text, err := input.Read(path, input.MaxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return "", err
	} else if err != nil {
		return "", status.Errorf(status.IO, "%w", err)
	}
	r.files = append(r.files, path)
	return string(input.TrimBOM(text)), nil
}

// tokenNames are the special tokens of every tokenizer that templates see as variables.
var tokenNames = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// specialTokens reads the special tokens that the tokenizer's files name.
func (r *Reader) specialTokens() error {
	if r.Folder == "" {
		return nil
	}
	for _, name := range []string{"tokenizer_config.json", "special_tokens_map.json"} {
		path := filepath.Join(r.Folder, name)
		text, err := r.read(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		var fields map[string]json.RawMessage
		if err := input.JSON([]byte(text), &fields); err != nil {
			return status.Errorf(status.InvalidConfig, "%s: %w", path, err)
		}
		r.setTokens(fields, tokenNames)
		r.setTokens(fields, furtherTokens(fields))
		for _, name := range []string{"extra_special_tokens", "model_specific_special_tokens"} {
			var named map[string]json.RawMessage
			if json.Unmarshal(fields[name], &named) == nil { // a list has no names
				r.setTokens(named, slices.Sorted(maps.Keys(named)))
			}
		}
	}
	if eos, ok := r.variables.Get("eos_token"); ok {
		r.Special = append(r.Special[:len(r.Special):len(r.Special)], eos.(jinja.Text).S)
	}
	return nil
}

// furtherTokens returns the names of fields that may have the special tokens of one model, such as
// image_token, which templates see as variables as well.
func furtherTokens(fields map[string]json.RawMessage) (names []string) {
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if strings.HasSuffix(name, "_token") {
			names = append(names, name)
		}
	}
	return names
}

// setTokens makes variables of special tokens, which are texts or objects with content. A variable
// that exists stays.
func (r *Reader) setTokens(tokens map[string]json.RawMessage, names []string) {
	for _, name := range names {
		_, exists := r.variables.Get(name)
		if _, other := reserved[name]; exists || other && !slices.Contains(tokenNames, name) {
			continue
		}
		var token string
		var object struct{ Content string }
		if json.Unmarshal(tokens[name], &token) != nil && json.Unmarshal(tokens[name], &object) == nil {
			token = object.Content
		}
		if token != "" {
			r.variables.Set(name, jinja.Text{S: token})
		}
	}
}
