package job

import (
	"cmp"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// credentials matches the start of a URL and the login in it: user:password@, and token@. A password that was not escaped may hold / and @,
// so the login ends at the last @ of the word.
var credentials = regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*:/+)(?:[^\s"'<>/?#:@]*:[^\s"'<>]*|[^\s"'<>/?#]*)@`)

// withoutLogins returns the text with *** in place of the logins in its URLs.
func withoutLogins(text string) string {
	if !strings.Contains(text, "@") {
		return text
	}
	return credentials.ReplaceAllString(text, "${1}***@")
}

// expansion is a path of the job, or its start, whose text has ${NAME}.
type expansion struct{ is, written string }

// leastExpansion keeps expansions out of the way that are so short that they occur in any text, such as "/" and "1".
const leastExpansion = 4

// expanded records what becomes of a path's variables, so that files which hold the job can name it as it was written: the path whole, and
// up to the end of each variable, because messages name other files of the same folder.
func (j *Job) expanded(dir, value string, getenv func(string) (string, bool)) {
	note := func(text string, of func(string) (string, bool)) {
		is, err := expand(text, of)
		if is = filepath.Join(dir, is); err == nil && len(is) >= leastExpansion {
			j.expansions = append(j.expansions, expansion{is, filepath.Join(dir, text)})
		}
	}
	ends := []int{len(value)}
	for _, at := range variable.FindAllStringIndex(value, -1) {
		ends = append(ends, at[1])
	}
	for _, end := range ends {
		note(value[:end], getenv)
		note(value[:end], escaped(getenv))
	}
	slices.SortStableFunc(j.expansions, func(a, b expansion) int { return cmp.Compare(len(b.is), len(a.is)) })
}

// shown returns a text as files that are handed on may hold it, such as a report: without logins of URLs, and with the job's paths as they
// were written, for the value of a variable may be a secret.
func (j *Job) shown(text string) string { return withoutLogins(j.asWritten(text)) }

// asWritten puts the job's paths back as they were written, wherever a text has them.
func (j *Job) asWritten(text string) string {
	var pairs []string
	for _, x := range j.expansions {
		pairs = append(pairs, x.is, x.written)
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// valueShown returns the value of a key as files that are handed on may hold it. A path is as it is used, unless it was written with
// variables: then it is as written.
func (j *Job) valueShown(f *field) any {
	v := reflect.ValueOf(j).Elem().FieldByIndex(f.index)
	written := j.written[f.key]
	one := func(i int, is string) string {
		if i < len(written) && written[i] != "" {
			return written[i]
		}
		return j.asWritten(is) // it may have been made of another path, as data.tokenizer is of model.path
	}
	switch x := v.Interface().(type) {
	case string:
		return one(0, x)
	case []string:
		list := slices.Clone(x)
		for i := range list {
			list[i] = one(i, list[i])
		}
		return list
	default:
		return x
	}
}
