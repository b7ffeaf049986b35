package file

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"ulysses/internal/status"
	"ulysses/train"
)

var (
	url     = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*://`)
	hubURL  = regexp.MustCompile(`^https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?$`)
	hubName = regexp.MustCompile(`^\w[\w.-]*/[\w.-]+$`)
	// the field at the start of a fault of package model, after the folder
	modelField = regexp.MustCompile(`(?:^|: )(model\.(?:new|override)): (\w+)`)
)

// NotURL returns the fix for a value that is a URL, or "" for other values. Files are read only
// from disk.
func NotURL(key, value string) string {
	switch m := hubURL.FindStringSubmatch(value); {
	case !url.MatchString(value):
		return ""
	case m != nil && strings.HasPrefix(key, "model."):
		return fmt.Sprintf(
			"a URL, and models are read from disk; run hf download %s --local-dir %s and name that folder", m[1],
			filepath.Base(m[1]))
	case strings.HasPrefix(strings.ToLower(value), "file://"):
		return "a URL, and a path is needed; write it without file://"
	}
	return "a URL, and files are read from disk; download it and name the file"
}

// ModelFault adds the line of the job file to an error of the model's folder or fields. If the
// folder does not exist or has a checkpoint, it also adds how to get a model folder.
func (j *Job) ModelFault(err error) error {
	if err == nil {
		return nil
	}
	key, text := "model.new", err.Error()
	if dir := j.Model.Path; dir != "" {
		key = "model.path"
		if from := train.FindCheckpoint(dir); from != "" {
			text += fmt.Sprintf("; it has a checkpoint: write a model folder with ulysses-mpi export %s FOLDER", from)
		} else if _, statErr := os.Stat(dir); errors.Is(statErr, fs.ErrNotExist) {
			text = j.NoFolder(dir)
		}
	}
	if !strings.HasPrefix(text, "model.") {
		text = key + ": " + text
	}
	return &status.Error{Code: status.Of(err), Text: fmt.Sprintf("%v: %s", j.Origin(modelKey(text, key)), text),
		Err: err}
}

// modelKey returns the key of the job file that a fault of the model's fields is about, or else
// another key.
func modelKey(fault, other string) string {
	if m := modelField.FindStringSubmatch(fault); m != nil {
		return m[1] + "." + m[2]
	}
	return other
}

// NoFolder returns the error text for a folder that does not exist, with the command that downloads
// the model if the path looks like a name on the Hugging Face hub.
func (j *Job) NoFolder(dir string) string {
	name := dir
	if rel, err := filepath.Rel(filepath.Dir(j.Path), dir); err == nil && !j.Origin("model.path").arg {
		name = filepath.ToSlash(rel)
	}
	if _, err := os.Stat(filepath.Dir(dir)); hubName.MatchString(name) && errors.Is(err, fs.ErrNotExist) {
		return fmt.Sprintf(
			"there is no folder %s, and models are read from disk; if this is a name on the Hugging Face hub, run hf download %s --local-dir %s",
			dir, name, dir)
	}
	return fmt.Sprintf("there is no folder %s; name a Hugging Face folder with config.json and *.safetensors", dir)
}
