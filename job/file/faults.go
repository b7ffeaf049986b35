package file

import (
	"fmt"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// origin is where a value was set: a line of the job file, or a --set argument.
type origin struct {
	file string
	line int // of the file; the number of a --set argument
	set  string
	arg  bool // it is a --set
}

func (o origin) String() string {
	if o.arg {
		arg := o.set
		if strings.ContainsFunc(arg, unicode.IsControl) || !utf8.ValidString(arg) || arg == "" {
			arg = strconv.Quote(arg)
		}
		return "--set " + input.Short(arg)
	}
	return fmt.Sprintf("%s:%d", o.file, o.line)
}

// Origin returns where a key was set. For a key that was not set it returns the line of its nearest
// table, or the first line of the file.
func (j *Job) Origin(key string) origin {
	for {
		if o, ok := j.at[key]; ok {
			return o
		}
		dot := strings.LastIndexByte(key, '.')
		if dot < 0 {
			return origin{file: j.Path, line: 1}
		}
		key = key[:dot]
	}
}

// dataKey matches the key with which an error of the data begins, also behind the name of a rank.
var dataKey = regexp.MustCompile(`^(?:rank \d+(?: on \S+)?: )?((?:data|eval)\.[a-z_]+)`)

// DataFault adds the line of the job file to an error of the data that begins with a key.
func (j *Job) DataFault(err error) error {
	if err == nil {
		return nil
	}
	key := dataKey.FindStringSubmatch(err.Error())
	if key == nil {
		return err
	}
	return &status.Error{Code: status.Of(err), Text: fmt.Sprintf("%v: %v", j.Origin(key[1]), err), Err: err}
}

type fault struct {
	origin
	code status.Code
	text string
}

// faults collects the faults of a job file, so that all of them are reported at once.
type faults []fault

func (f *faults) add(o origin, code status.Code, format string, args ...any) {
	*f = append(*f, fault{o, code, input.Words(fmt.Sprintf(format, args...))})
}

// deep adds the fault of a line with more levels than keyLines follows. The library would need
// quadratic time for it.
func (f *faults) deep(o origin) {
	f.add(o, status.InvalidConfig, "keys or values are nested more than %d levels deep", maxNesting)
}

// twice adds the fault of a key that contradicts an earlier line.
func (f *faults) twice(o origin, c clash) {
	f.add(o, status.InvalidConfig, "%s: already defined on line %d", c.key, c.first)
}

// err returns the faults in the order of the file, one in each line; nil if there is none. The code
// is InvalidConfig if any fault has that code, otherwise Unsupported.
func (f *faults) err() error {
	if len(*f) == 0 {
		return nil
	}
	sort.Slice(*f, func(i, j int) bool {
		a, b := (*f)[i], (*f)[j]
		if a.arg != b.arg {
			return b.arg
		}
		if a.line != b.line {
			return a.line < b.line
		}
		return a.text < b.text // all ranks must return the same text, whatever the order of maps
	})
	code, lines, seen := status.Unsupported, []string(nil), map[string]bool{}
	for _, x := range *f {
		if x.code != status.Unsupported {
			code = status.InvalidConfig
		}
		if s := x.origin.String() + ": " + x.text; !seen[s] {
			seen[s] = true
			lines = append(lines, s)
		}
	}
	if len(*f) == 1 {
		code = (*f)[0].code
	}
	return &status.Error{Code: code, Text: strings.Join(lines, "\n"), Faults: lines}
}
