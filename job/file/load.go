package file

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"

	"github.com/BurntSushi/toml"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// maxSource is the largest size of a job file in bytes. A larger file is not a job file.
const maxSource = 256 << 10

// Read returns the bytes of a job file.
func Read(path string) ([]byte, error) {
	src, err := input.Read(path, maxSource)
	if err != nil {
		return nil, status.Errorf(status.IO, "job file %s: %w", path, err)
	}
	return src, nil
}

// Parse reads a job file from its bytes, applies the --set arguments in order and checks the job.
// The error has a line for each fault, with the line of the file or the --set argument. path is the
// file's name; relative paths in the file are relative to its folder, and in a --set to the current
// directory. getenv returns the values of ${NAME} in paths; nil = the environment.
func Parse(src []byte, path string, sets []string, getenv func(string) (string, bool)) (*Job, error) {
	if getenv == nil {
		getenv = os.LookupEnv
	}
	d := Default()
	l := &loader{job: &d, bad: map[string]bool{}}
	l.job.Path, l.job.at, l.job.written = path, map[string]origin{}, map[string][]string{}
	l.file(strings.ReplaceAll(string(input.TrimBOM(src)), "\r\n", "\n"))
	for i, s := range sets {
		l.set(i, s)
	}
	l.paths(getenv)
	l.check()
	if err := l.faults.err(); err != nil {
		return nil, err
	}
	return l.job, nil
}

// loader fills a Job and collects faults.
type loader struct {
	job    *Job
	faults faults
	broken bool            // a syntax error has removed lines, so keys may be missing
	bad    map[string]bool // keys that have a fault
}

func (l *loader) fault(o origin, key, format string, args ...any) {
	l.bad[key] = true
	l.faults.add(o, status.InvalidConfig, format, args...)
}

func (l *loader) file(src string) {
	at := func(line int) origin { return origin{file: l.job.Path, line: line} }
	if len(src) > maxSource {
		l.broken = true
		l.faults.add(at(1), status.InvalidConfig, "%d bytes are too many for a job file; at most %d are possible",
			len(src), maxSource)
		return
	}
	lines := keyLines(src)
	if lines.deep > 0 {
		l.broken = true
		l.faults.deep(at(lines.deep))
		return
	}
	tree, repaired := l.decode(src, at)
	if tree == nil {
		return
	}
	if repaired != src {
		lines = keyLines(repaired)
	}
	for _, c := range lines.clashes {
		l.bad[c.key] = true
		l.faults.twice(at(c.line), c)
	}
	l.table(nil, tree, func(key string) origin {
		if line := lines.lines[key]; line > 0 {
			return at(line)
		}
		return at(1)
	})
}

// decode parses the source and returns the source without faulty lines. The library stops at the
// first syntax error; decode removes the faulty line and tries again, unless the error affects the
// following lines, as an unfinished list or string does.
func (l *loader) decode(src string, at func(int) origin) (tree map[string]any, repaired string) {
	for last, n := 0, 1; ; n++ {
		tree = nil
		err := decodeTOML(src, &tree)
		if err == nil {
			return tree, src
		}
		l.broken = true
		var pe toml.ParseError
		if !errors.As(err, &pe) {
			l.faults.add(at(1), status.InvalidConfig, "%v", err)
			return nil, src
		}
		start := min(max(pe.Position.Start, 0), len(src))
		line := 1 + strings.Count(src[:start], "\n")
		if line <= last || n > maxSyntaxFaults {
			return nil, src
		}
		last = line
		lo := strings.LastIndexByte(src[:start], '\n') + 1
		hi := len(src)
		if n := strings.IndexByte(src[start:], '\n'); n >= 0 {
			hi = start + n
		}
		header := strings.HasPrefix(strings.TrimSpace(src[lo:hi]), "[")
		l.faults.add(at(line), status.InvalidConfig, "%s", syntaxText(pe, header))
		continued := strings.HasPrefix(pe.Message, "expected value") && !strings.Contains(src[lo:start], "=")
		if continued || strings.Contains(pe.Message, "terminator") || strings.Contains(pe.Message, "EOF") ||
			strings.Contains(pe.Message, "UTF") {
			return nil, src
		}
		with := ""
		if header {
			with = fmt.Sprintf("[%q]", fmt.Sprintf("%s%d", setAside, line))
		}
		src = src[:lo] + with + src[hi:]
	}
}

// maxSyntaxFaults is the largest number of faulty lines that decode removes. A file with more is
// not a job file.
const maxSyntaxFaults = 20

// setAside is the first character of the name that decode gives to a table with a faulty header.
// Its keys are not checked.
const setAside = "?"

// decodeTOML decodes TOML. It returns an error for panics of the library, which it raises for some
// inputs.
func decodeTOML(src string, tree *map[string]any) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("not TOML: %v", r)
		}
	}()
	_, err = toml.Decode(src, tree)
	return err
}

var (
	unquoted = regexp.MustCompile(`^expected value but found "(.*)" instead$`)
	twice    = regexp.MustCompile(`^Key '(.*)' has already been defined$`)
)

func syntaxText(pe toml.ParseError, header bool) string {
	text := strings.ReplaceAll(strings.TrimSuffix(pe.Message, "."), `'\n'`, "the end of the line")
	if m := unquoted.FindStringSubmatch(pe.Message); m != nil {
		if word := strings.ToLower(m[1]); word == "true" || word == "false" {
			text += "; write " + word
		} else {
			text += fmt.Sprintf("; write text in quotes: %q", m[1])
		}
	}
	if strings.HasPrefix(text, "invalid escape in string") {
		text += `; write / between folders, or \\ for a \`
	}
	if m := twice.FindStringSubmatch(text); m != nil && header {
		return fmt.Sprintf("[%s] stands twice in the file; write its keys below the first one", m[1])
	} else if m != nil {
		return m[1] + ": set twice; keep one of the lines"
	}
	if pe.LastKey != "" && !header {
		return fmt.Sprintf("%s: not TOML: %s", pe.LastKey, text)
	}
	return "not TOML: " + text
}

// table assigns the keys of a table and reports the keys that job files do not have.
func (l *loader) table(prefix toml.Key, tree map[string]any, at func(string) origin) {
	for name, value := range tree {
		if len(prefix) == 0 && strings.HasPrefix(name, setAside) && l.broken {
			continue
		}
		path := append(prefix[:len(prefix):len(prefix)], name)
		key := path.String()
		sub, isTree := value.(map[string]any)
		_, isTrees := value.([]map[string]any)
		switch f := byKey[key]; {
		case f != nil:
			l.assign(f, value, at)
		case isTable(key) && isTree:
			l.job.at[key] = at(key)
			l.table(path, sub, at)
		case isTable(key) && isTrees:
			l.fault(at(key), key, "%s: one table is needed; write [%s], not [[%s]]", key, key, key)
		case isTable(key):
			l.fault(at(key), key, "%s = %s: %s is a table; write [%s] and its keys below", key, show(value), key, key)
		case isTree && len(prefix) == 0:
			l.unknownTable(path, sub, at)
		case isTrees && len(prefix) == 0:
			l.unknownTable(path, nil, at)
		default:
			text, code := unknownKey(key)
			l.unknown(at(key), key, text, code)
		}
	}
}

// unknown returns the fault of a key or table that job files do not have.
func (l *loader) unknown(o origin, key, text string, code status.Code) {
	l.bad[key] = true
	l.faults.add(o, code, "%s: %s", key, text)
}

// unknownTable returns the fault of an unknown table, and the faults of its keys if they add
// information: all keys that the likely table does not have, otherwise the keys that this program
// has under another name.
func (l *loader) unknownTable(path toml.Key, tree map[string]any, at func(string) origin) {
	text, code := unknownTable(path.String())
	l.unknown(at(path.String()), path.String(), text, code)
	if code == status.Unsupported {
		return
	}
	meant := Nearest(path.String(), tables)
	for name := range tree {
		key := append(path[:len(path):len(path)], name).String()
		if _, ours := foreign[plain(name)]; ours || meant != "" && byKey[meant+"."+name] == nil {
			text, code := unknownKey(toml.Key{meant, name}.String())
			l.unknown(at(key), key, text, code)
		}
	}
}

func (l *loader) assign(f *field, value any, at func(string) origin) {
	o := at(f.key)
	if err := f.set(l.job, value); err != nil {
		l.fault(o, f.key, "%v", err)
	}
	for key := range l.job.at {
		if strings.HasPrefix(key, f.key+".") {
			delete(l.job.at, key)
		}
	}
	l.job.at[f.key] = o
	if m, ok := value.(map[string]any); ok {
		l.recordOrigins(toml.Key(strings.Split(f.key, ".")), m, at)
	}
}

// recordOrigins records where the fields of a table without fixed keys were set.
func (l *loader) recordOrigins(path toml.Key, m map[string]any, at func(string) origin) {
	for name, value := range m {
		sub := append(path[:len(path):len(path)], name)
		l.job.at[sub.String()] = at(sub.String())
		if m, ok := value.(map[string]any); ok {
			l.recordOrigins(sub, m, at)
		}
	}
}
