package file

import (
	"os"
	"path/filepath"
	"strings"

	"ulysses/internal/status"
)

// chooseTokenizer replaces data.tokenizer = "auto": for text, in files or in eval.sample, by the
// tokenizer.json of the model's folder, otherwise by "bytes". It refuses a folder with a tokenizer
// in another format, because its model was not trained on bytes.
func (j *Job) chooseTokenizer() error {
	if !j.IsModelJob() || j.Data.Tokenizer != "auto" {
		return nil
	}
	text := ""
	if len(j.Eval.Sample) > 0 {
		text = "eval.sample"
	}
	for _, p := range append(j.trainFiles(), j.evalFiles()...) {
		switch strings.ToLower(filepath.Ext(p)) {
		case ".safetensors", ".bin", ".idx": // tokens
		default:
			text = p
		}
	}
	if j.Model.Path == "" || text == "" {
		j.Data.Tokenizer = "bytes"
		return nil
	}
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(j.Model.Path, name))
		return err == nil
	}
	if has("tokenizer.json") {
		j.Data.Tokenizer = filepath.Join(j.Model.Path, "tokenizer.json")
		return nil
	}
	for _, other := range []string{"tokenizer.model", "vocab.json", "vocab.txt", "tekken.json",
		"tokenizer_config.json"} {
		if has(other) {
			return j.Errorf(status.Unsupported, "data.tokenizer",
				"%s needs the tokenizer of %s, which has %s and no tokenizer.json; "+
					"write a tokenizer.json with save_pretrained of a fast tokenizer", text, j.Model.Path, other)
		}
	}
	j.Data.Tokenizer = "bytes"
	return nil
}
