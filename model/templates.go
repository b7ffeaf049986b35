package model

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// The chat templates of a folder, as transformers stores them: templateFile is the default, and
// templateFolder has a file NAME.jinja for each other one.
const (
	templateFile    = "chat_template.jinja"
	templateFolder  = "additional_chat_templates"
	templateSuffix  = ".jinja"
	defaultTemplate = "default"
)

// readTemplates returns the texts of the chat templates of a folder by name. Templates in JSON
// files are not read.
func readTemplates(dir string) (map[string]string, error) {
	paths := map[string]string{}
	for _, path := range input.Match(filepath.Join(dir, templateFolder), "*"+templateSuffix) {
		paths[strings.TrimSuffix(filepath.Base(path), templateSuffix)] = path
	}
	paths[defaultTemplate] = filepath.Join(dir, templateFile)
	texts := map[string]string{}
	for name, path := range paths {
		text, err := input.Read(path, input.MaxConfig)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, status.Errorf(status.IO, "%w", err)
		}
		texts[name] = string(text)
	}
	return texts, nil
}

// writeTemplates writes chat templates to the folder of a model.
func writeTemplates(dir string, texts map[string]string) error {
	for name, text := range texts {
		path := filepath.Join(dir, templateFile)
		if name != defaultTemplate {
			path = filepath.Join(dir, templateFolder, name+templateSuffix)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			return status.Errorf(status.IO, "%w", err)
		}
		err := tensor.WriteFile(path, func(w io.Writer) error {
			_, err := io.WriteString(w, text)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
