package train

import (
	"os"
	"path/filepath"
	"testing"

	"ulysses/data"
)

func file(t testing.TB, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func config(sequence int64, paths ...string) data.Config {
	return data.Config{Path: paths, Tokenizer: "bytes", TextField: "text", Sequence: sequence, Batch: 1, Accumulate: 1,
		Pack: true}
}
