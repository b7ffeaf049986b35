package operator

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// inputFile is the input file of an operator job.
type inputFile struct {
	file *tensor.Safetensors // nil if it cannot be opened
	kind string              // the kind of the job, which is the name of its table in the job file
}

// openInput opens the input of a job. On the rank that will write the output, it checks that the
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

func (in *inputFile) base() *inputFile { return in }

// same returns an error if ranks see files with different content. Collective.
func (in *inputFile) same(c comm.Comm) error {
	return comm.SameFiles(c, in.kind+".input", []comm.File{comm.SafetensorsFile(in.file.Path, in.file)})
}

func (in *inputFile) close() {
	if in.file != nil {
		in.file.Close()
	}
}

// checkOutput checks that the output can be written, before the work.
func checkOutput(f *faultList, kind, input, output string) {
	in, err := os.Stat(input)
	if out, err2 := os.Stat(output); err == nil && err2 == nil {
		if os.SameFile(in, out) {
			f.add(status.InvalidConfig, "%s.output: %s is %s.input; name another file", kind, output, kind)
		} else if out.IsDir() {
			f.add(status.IO, "%s.output: %s is a folder; name a file", kind, output)
		} else if !out.Mode().IsRegular() { // the output would replace it
			f.add(status.IO, "%s.output: %s is a device or a pipe; name a regular file", kind, output)
		}
	}
	var probe *os.File
	name, err := tensor.Beside(output, func(name string) (err error) {
		probe, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		return err
	})
	if err != nil {
		f.add(status.IO, "%s.output: %s cannot be written: %w; name a file in a folder that exists and can be written",
			kind, output, err)
		return
	}
	probe.Close()
	tensor.Discard(name)
}

// checkNames refuses tensors that the job does not read. Results of an earlier run may be in the
// file; they are skipped.
func (in *inputFile) checkNames(f *faultList, known, results []string) {
	for _, e := range in.file.Entries() {
		if !slices.Contains(known, e.Name) && !slices.Contains(results, e.Name) {
			f.add(status.InvalidConfig, "%s.input: tensor %v: unknown; the names are %s", in.kind, e,
				strings.Join(known, ", "))
		}
	}
}

// floats returns the entry of a tensor with the given axes, none of them empty, in a type that F32
// represents exactly. required lists the tensors that the job needs; "" = the tensor is optional.
func (in *inputFile) floats(f *faultList, name, required string, axes ...string) tensor.Entry {
	e, ok := in.file.Entry(name)
	switch {
	case !ok && required != "":
		f.add(status.InvalidConfig, "%s.input: %s has no tensor %s; save %s", in.kind, in.file.Path, name, required)
	case !ok:
	case e.DType != tensor.F32 && e.DType != tensor.BF16 && e.DType != tensor.F16:
		f.add(status.InvalidConfig, "%s.input: tensor %v: the type is not supported; save it as F32, BF16 or F16",
			in.kind, e)
	case len(e.Shape) != len(axes) || e.Numel() == 0:
		f.add(status.InvalidConfig, "%s.input: tensor %v: wrong shape; save it with the axes [%s], none of them empty",
			in.kind, e, strings.Join(axes, ", "))
	}
	return e
}

// checkShape compares the shape of a tensor, unless it is absent, with the shape of model.
func (in *inputFile) checkShape(f *faultList, e tensor.Entry, model string, shape ...int64) {
	if e.Name != "" && !slices.Equal(e.Shape, shape) {
		f.add(status.InvalidConfig, "%s.input: %v: wrong shape; save it with the shape of %s, %v", in.kind, e,
			model, shape)
	}
}

// integers reads an optional list of integers with the given length, or with length 0, of at most
// most elements. It returns nil if the tensor is absent.
func (in *inputFile) integers(f *faultList, name string, length, most int64) []int64 {
	e, ok := in.file.Entry(name)
	if !ok {
		return nil
	}
	if e.DType != tensor.I32 && e.DType != tensor.I64 {
		f.add(status.InvalidConfig, "%s.input: tensor %v: the type is not supported; save it as I32 or I64", in.kind, e)
		return nil
	}
	if len(e.Shape) != 1 || length > 0 && e.Shape[0] != length || e.Shape[0] > most {
		content := "the start of each document, then the end"
		if length > 0 {
			content = fmt.Sprintf("%d integers, one for each token of q", length)
		}
		f.add(status.InvalidConfig, "%s.input: tensor %v: wrong shape; save a list of %s", in.kind, e, content)
		return nil
	}
	x := make([]int64, e.Shape[0])
	if err := in.file.ReadInt64(e, 0, x); err != nil {
		f.add(status.Of(err), "%s.input: %w", in.kind, err)
		return nil
	}
	return x
}

// read reads elements of e, from start on, into values. NaN, Inf and the values for which invalid
// returns a text are errors.
func (in *inputFile) read(e tensor.Entry, start int64, values []float32, invalid func(float32) string) error {
	if err := in.file.ReadFloat32(e, start, values); err != nil {
		return err
	}
	for i, v := range values {
		text := ""
		if v-v != 0 { // v-v is not 0 for NaN, +Inf and -Inf
			text = "save finite numbers"
		} else if invalid != nil {
			text = invalid(v)
		}
		if text != "" {
			return status.Errorf(status.Numeric, "%s.input: %s: %s%v is %v; %s", in.kind, in.file.Path, e.Name,
				index(e.Shape, start+int64(i)), v, text)
		}
	}
	return nil
}

// index returns the index of an element as text, [i, j, k], from its flat index.
func index(shape []int64, at int64) string {
	s := make([]string, len(shape))
	for i := len(shape) - 1; i >= 0; i-- {
		s[i] = fmt.Sprint(at % shape[i])
		at /= shape[i]
	}
	return "[" + strings.Join(s, ", ") + "]"
}

// fault returns an error of a plan or a batch with the key and the path of the input. A refusal
// begins with the name of a Go function, which users of jobs do not know: fault leaves it out.
func (in *inputFile) fault(err error) error {
	code := status.Of(err)
	if code != status.InvalidArgument && code != status.Unsupported {
		return status.Errorf(code, "%s.input: %s: %w", in.kind, in.file.Path, err)
	}
	if code == status.InvalidArgument {
		code = status.InvalidConfig
	}
	return status.Errorf(code, "%s.input: %s: %s", in.kind, in.file.Path, status.WithoutGoNames(err))
}

// faultList collects errors, so that all of them are reported at once.
type faultList struct {
	errs []error
	code status.Code // Unsupported, unless there is a fault with another code
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
