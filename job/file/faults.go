package file

import (
	"fmt"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// origin is where a value was set: a line of the job file, or a --set as the user typed it.
type origin struct {
	file string
	line int // of the file, or the --set's number
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

// Origin of a key that was not set is the line of the nearest table that holds it, else the first
// line.
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

type fault struct {
	origin
	code status.Code
	text string
}

// faults gathers everything wrong with a job file, so that one run shows all of it.
type faults []fault

func (f *faults) add(o origin, code status.Code, format string, args ...any) {
	*f = append(*f, fault{o, code, input.Words(fmt.Sprintf(format, args...))})
}

// err is nil, or all faults in the order of the file, one a line. What is plain wrong outweighs
// what is merely not built.
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
		return a.text < b.text // not the order of a map: all ranks must say the same
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
	return &status.Error{Code: code, Text: strings.Join(lines, "\n"), Faults: len(lines)}
}
