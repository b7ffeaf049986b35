package train

import (
	"os"
	"path/filepath"
	"testing"

	"ulysses/data"
	"ulysses/tensor"
)

func file(t testing.TB, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func tokensFile(t testing.TB, dir, name string, rows, width int64, items map[string][]int64) string {
	t.Helper()
	path := filepath.Join(dir, name)
	var list []tensor.Item
	for _, n := range []string{"input_ids", "labels", "position_ids"} {
		if items[n] == nil {
			continue
		}
		x := make([]int32, len(items[n]))
		for i, v := range items[n] {
			x[i] = int32(v)
		}
		list = append(list, tensor.Item{Name: n, Tensor: tensor.OfInt32(x, rows, width)})
	}
	if err := tensor.WriteSafetensors(path, nil, list); err != nil {
		t.Fatal(err)
	}
	return path
}

func config(sequence int64, paths ...string) data.Config {
	return data.Config{Path: paths, Tokenizer: "bytes", TextField: "text", Sequence: sequence, Batch: 1, Accumulate: 1, Pack: true}
}
