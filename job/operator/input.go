package operator

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"ulysses/comm"
	"ulysses/internal/notbuilt"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// inputFile is the input of an operator job, "attention" or "gdn": a file whose header is
// being checked.
type inputFile struct {
	file *tensor.Safetensors
	kind string // the table of the job file that names it
}

// openInput opens the input of a table and finds out, on the rank that will write, whether the
// output can be written.
func openInput(f *faultList, kind, input, output string, writer bool) inputFile {
	if writer {
		checkOutput(f, kind, input, output)
	}
	file, err := tensor.OpenSafetensors(input)
	if err != nil {
		f.add(status.Of(err), "%s.input: %w", kind, err)
	}
	return inputFile{file, kind}
}

// same refuses an input if ranks see different copies of it. Collective.
func (in *inputFile) same(c comm.Comm) error {
	return comm.SameFiles(c, in.kind+".input", []comm.File{comm.SafetensorsFile(in.file.Path, in.file)})
}

func (in *inputFile) close() {
	if in.file != nil {
		in.file.Close()
	}
}

// checkOutput finds out before the work whether its result can be written.
func checkOutput(f *faultList, kind, input, output string) {
	in, err := os.Stat(input)
	if out, err2 := os.Stat(output); err == nil && err2 == nil {
		if os.SameFile(in, out) {
			f.add(status.InvalidConfig, "%s.output: %s is %s.input: name another file", kind, output, kind)
		} else if out.IsDir() {
			f.add(status.IO, "%s.output: %s is a folder: name a file", kind, output)
		} else if !out.Mode().IsRegular() { // the result would take its place
			f.add(status.IO, "%s.output: %s is a device or a pipe: name a file", kind, output)
		}
	}
	var probe *os.File
	name, err := tensor.Beside(output, func(name string) (err error) {
		probe, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		return err
	})
	if err != nil {
		f.add(status.IO, "%s.output: %s cannot be written: %w: make its folder, or name another", kind, output, err)
		return
	}
	probe.Close()
	tensor.Discard(name)
}

// names refuses tensors that are not read. Results of an earlier run may lie in the file too and
// are passed over.
func (in *inputFile) names(f *faultList, known, results []string, refused map[string]*notbuilt.Feature) {
	for _, e := range in.file.Entries() {
		switch {
		case refused[e.Name] != nil:
			f.add(status.Unsupported, "%s.input: tensor %v: %s", in.kind, e, refused[e.Name].Text("take it out"))
		case !slices.Contains(known, e.Name) && !slices.Contains(results, e.Name):
			f.add(status.InvalidConfig, "%s.input: tensor %v: unknown: the names are %s", in.kind, e, strings.Join(known, ", "))
		}
	}
}

// floats finds a tensor with these axes, none empty, in a type that widens to f32 exactly.
func (in *inputFile) floats(f *faultList, name, required string, axes ...string) tensor.Entry {
	e, ok := in.file.Entry(name)
	switch {
	case !ok && required != "":
		f.add(status.InvalidConfig, "%s.input: %s has no tensor %s: save %s", in.kind, in.file.Path, name, required)
	case !ok:
	case e.DType != tensor.F32 && e.DType != tensor.BF16 && e.DType != tensor.F16:
		f.add(status.InvalidConfig, "%s.input: tensor %v: save it as F32, BF16 or F16", in.kind, e)
	case len(e.Shape) != len(axes) || e.Numel() == 0:
		f.add(status.InvalidConfig, "%s.input: tensor %v: it must have the axes [%s], none of them empty", in.kind, e, strings.Join(axes, ", "))
	}
	return e
}

// like holds an optional tensor to a shape.
func (in *inputFile) like(f *faultList, e tensor.Entry, what string, shape ...int64) {
	if e.Name != "" && !slices.Equal(e.Shape, shape) {
		f.add(status.InvalidConfig, "%s.input: %v: it has the shape of %s, %v", in.kind, e, what, shape)
	}
}

// integers reads an optional list of a length, or, with length 0, of at most so many.
func (in *inputFile) integers(f *faultList, name string, length, most int64) []int64 {
	e, ok := in.file.Entry(name)
	if !ok {
		return nil
	}
	if e.DType != tensor.I32 && e.DType != tensor.I64 {
		f.add(status.InvalidConfig, "%s.input: tensor %v: save it as I32 or I64", in.kind, e)
		return nil
	}
	if len(e.Shape) != 1 || length > 0 && e.Shape[0] != length || e.Shape[0] > most {
		f.add(status.InvalidConfig, "%s.input: tensor %v: it must be a list%s", in.kind, e,
			map[bool]string{true: fmt.Sprintf(" of %d, one for each row of q", length), false: ": each document's start, then the end"}[length > 0])
		return nil
	}
	x := make([]int64, e.Shape[0])
	if err := in.file.ReadInt64(e, 0, x); err != nil {
		f.add(status.Of(err), "%s.input: %w", in.kind, err)
		return nil
	}
	return x
}

// read fills values with the elements of e from start on. It refuses NaN and infinity, and what
// wrong has words for.
func (in *inputFile) read(e tensor.Entry, start int64, values []float32, wrong func(float32) string) error {
	if err := in.file.ReadFloat32(e, start, values); err != nil {
		return err
	}
	for i, v := range values {
		text := ""
		if v-v != 0 { // NaN and the infinities alone
			text = "save finite numbers"
		} else if wrong != nil {
			text = wrong(v)
		}
		if text != "" {
			return status.Errorf(status.Numeric, "%s.input: %s: %s%v is %v: %s", in.kind, in.file.Path, e.Name, place(e.Shape, start+int64(i)), v, text)
		}
	}
	return nil
}

// place is the index of an element, written as [i, j, k].
func place(shape []int64, at int64) string {
	s := make([]string, len(shape))
	for i := len(shape) - 1; i >= 0; i-- {
		s[i] = fmt.Sprint(at % shape[i])
		at /= shape[i]
	}
	return "[" + strings.Join(s, ", ") + "]"
}

// fault says in which file what a plan or a batch refused is.
func (in *inputFile) fault(err error) error {
	code := status.Of(err)
	if code == status.InvalidArgument {
		code = status.InvalidConfig
	}
	return status.Errorf(code, "%s.input: %s: %w", in.kind, in.file.Path, err)
}

// faultList gathers errors, so that one run shows all of them.
type faultList struct {
	errs []error
	code status.Code // Unsupported, unless something is plain wrong
}

func (f *faultList) add(code status.Code, format string, args ...any) {
	if len(f.errs) == 0 || f.code == status.Unsupported {
		f.code = code
	}
	f.errs = append(f.errs, fmt.Errorf(format, args...))
}

func (f *faultList) err() error {
	if len(f.errs) == 0 {
		return nil
	}
	err := errors.Join(f.errs...)
	return &status.Error{Code: f.code, Text: err.Error(), Err: err}
}
