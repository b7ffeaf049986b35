package job

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/model"
)

var (
	//go:embed init/finetune.toml
	finetuneText string
	//go:embed init/scratch.toml
	scratchText string

	initTemplates = template.Must(template.New("").Funcs(template.FuncMap{"toml": file.TOML}).Parse(""))
	finetune      = template.Must(template.Must(initTemplates.Clone()).New("finetune.toml").Parse(finetuneText))
	scratch       = template.Must(template.Must(initTemplates.Clone()).New("scratch.toml").Parse(scratchText))
)

// longestStart is the largest data.sequence that init writes. A model may have more positions than
// the memory of a first run allows.
const longestStart = 8192

// newJob has the values for the templates of job files.
type newJob struct {
	File string // the job file
	// the model's folder, relative to the job file if possible; "" = a model from scratch
	Model                      string
	Type                       string
	Layers, Width, Heads, Most int64 // Most is the number of positions of the model
	Sequence                   int64
	Dropout                    string // the field of config.json with a dropout that is not built; "" = none
}

// initJob is the verb init. It writes a commented job file that fine-tunes the model folder in
// o.words, or, without a folder, trains a small model from scratch.
func initJob(o Options) error {
	x := newJob{File: o.output, Sequence: 1024}
	text := scratch
	if len(o.words) > 0 {
		text = finetune
		folder := filepath.Clean(o.words[0])
		if why := file.NotURL("model.path", o.words[0]); why != "" {
			return status.Errorf(status.InvalidArgument, "init: %s: %s", o.words[0], why)
		}
		if strings.Contains(folder, "${") {
			return status.Errorf(status.InvalidArgument,
				"init: %s: ${ starts a variable in job files; rename the folder", folder)
		}
		c, err := model.ReadConfig(folder, nil)
		if err != nil {
			return initFault(&file.Job{Path: o.output, Model: file.ModelTable{Path: folder}}, err)
		}
		x.Model, x.Type, x.Layers, x.Width, x.Heads = pathFrom(filepath.Dir(o.output), folder), c.ModelType,
			c.NumHiddenLayers, c.HiddenSize, c.NumAttentionHeads
		x.Most, x.Dropout = c.Positions(), c.DropsResiduals()
		x.Sequence = min(x.Most, longestStart)
	}
	var b strings.Builder
	if err := text.Execute(&b, x); err != nil {
		return status.Errorf(status.Internal, "init: %w", err)
	}
	if _, err := file.Parse([]byte(b.String()), o.output, nil, nil); err != nil {
		return status.Errorf(status.Internal, "init: the template of the job file is wrong: %w", err)
	}
	if err := writeNew("init", o.output, b.String(), 0o666); err != nil {
		return err
	}
	return written(fmt.Fprintf(o.Stdout, "wrote %s\nedit data.path in it, then: ulysses-mpi plan %s\n", o.output,
		o.output))
}

// initFault returns the error for a folder without a model, with the fix.
func initFault(j *file.Job, err error) error {
	text := err.Error()
	if _, statErr := os.Stat(j.Model.Path); errors.Is(statErr, fs.ErrNotExist) {
		text = j.NoFolder(j.Model.Path)
	}
	return &status.Error{Code: status.Of(err), Text: "init: " + text, Err: err}
}

// pathFrom returns a path relative to a folder. If both are relative, the result is relative, so
// that the two can be moved together.
func pathFrom(folder, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	if filepath.IsAbs(folder) {
		if whole, err := filepath.Abs(path); err == nil {
			path = whole
		}
	}
	if rel, err := filepath.Rel(folder, path); err == nil {
		return rel
	}
	return path
}

// writeNew writes a file for a verb. It fails if the file exists, and leaves no incomplete file.
func writeNew(verb, path, text string, mode fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if errors.Is(err, fs.ErrExist) {
		return status.Errorf(status.IO, "%s: %s exists; name another file with -o", verb, path)
	}
	if err == nil {
		_, err = f.WriteString(text)
		if closed := f.Close(); err == nil {
			err = closed
		}
		if err != nil {
			os.Remove(path)
		}
	}
	if err != nil {
		return status.Errorf(status.IO, "%s: %w", verb, err)
	}
	return nil
}
