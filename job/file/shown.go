package file

import (
	"cmp"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"ulysses/data"
)

// credentials matches the start of a URL with its login: user:password@ or token@. A password that
// is not escaped may contain / and @, so the login ends at the last @ of the word.
var credentials = regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*:/+)(?:[^\s"'<>/?#:@]*:[^\s"'<>]*|[^\s"'<>/?#]*)@`)

// WithoutLogins returns the text with *** for the logins in its URLs.
func WithoutLogins(text string) string {
	if !strings.Contains(text, "@") {
		return text
	}
	return credentials.ReplaceAllString(text, "${1}***@")
}

// expansion is an expanded path of the job, or the beginning of one, and its text with ${NAME}.
type expansion struct{ value, written string }

// leastExpansion is the length of the shortest expansion that is replaced. Shorter ones, such as
// "/" and "1", occur in any text.
const leastExpansion = 4

// recordExpansion records the expansion of the variables of a path, so that reports can show the
// path as it was written. It records the whole path, and the path up to the end of each variable,
// because messages name other files of the same folder.
func (j *Job) recordExpansion(dir, value string, getenv func(string) (string, bool)) {
	record := func(text string, getenv func(string) (string, bool)) {
		value, err := expand(text, getenv)
		if value = filepath.Join(dir, value); err == nil && len(value) >= leastExpansion {
			j.expansions = append(j.expansions, expansion{value, filepath.Join(dir, text)})
		}
	}
	ends := []int{len(value)}
	for _, at := range variable.FindAllStringIndex(value, -1) {
		ends = append(ends, at[1])
	}
	for _, end := range ends {
		record(value[:end], getenv)
		record(value[:end], escaped(getenv))
	}
	slices.SortStableFunc(j.expansions, func(a, b expansion) int { return cmp.Compare(len(b.value), len(a.value)) })
}

// Shown returns a text for files that users share, such as a report. It removes the logins of URLs
// and replaces expanded paths by their variables, because the value of a variable may be a secret.
func (j *Job) Shown(text string) string { return WithoutLogins(j.asWritten(text)) }

// asWritten replaces the job's expanded paths in a text by their written forms.
func (j *Job) asWritten(text string) string {
	var pairs []string
	for _, x := range j.expansions {
		pairs = append(pairs, x.value, x.written)
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// valueShown returns the value of a key for files that users share: a path with variables as it
// was written, any other value as it is used. Other keys than paths have no variables; a word in
// them may be equal to the value of one.
func (j *Job) valueShown(f *field) any {
	v := reflect.ValueOf(j).Elem().FieldByIndex(f.index)
	written, isPath := j.written[f.key], f.tag.Get("path") != ""
	one := func(i int, value string) string {
		if i < len(written) && written[i] != "" {
			return written[i]
		}
		// the path may come from another key, as data.tokenizer from model.path
		return j.asWritten(value)
	}
	switch x := v.Interface().(type) {
	case string:
		if !isPath {
			return x
		}
		return one(0, x)
	case []string:
		if !isPath {
			return x
		}
		list := slices.Clone(x)
		for i := range list {
			list[i] = one(i, list[i])
		}
		return list
	case []data.SourceConfig:
		list := slices.Clone(x)
		for i := range list {
			list[i].Path = slices.Clone(list[i].Path)
			for k, p := range list[i].Path {
				list[i].Path[k] = j.asWritten(p)
			}
		}
		return list
	case []data.EvalSetConfig:
		list := slices.Clone(x)
		for i := range list {
			list[i].Path = slices.Clone(list[i].Path)
			for k, p := range list[i].Path {
				list[i].Path[k] = j.asWritten(p)
			}
		}
		return list
	default:
		return x
	}
}

// KeyValue is a key of the job file with its value as the file would write it.
type KeyValue struct {
	Key, Value string
	Set        bool // by the file or by --set; false = the default
}

// Keys returns every key with its value, in the order of the schema, for files that users share.
func (j *Job) Keys() (all []KeyValue) {
	for i := range schema {
		f := &schema[i]
		all = append(all, KeyValue{f.key, WithoutLogins(TOML(j.valueShown(f))), j.IsSet(f.key)})
	}
	return all
}
