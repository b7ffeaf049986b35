package job

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// With train.on_nan = "skip", a step whose gradient is NaN changes nothing, and is not counted by
// the bias correction of AdamW. A checkpoint has this count, so a resumed run is bitwise equal.
func TestResumeAfterASkippedStep(t *testing.T) {
	dir, run := newKept(t)
	const model = `model.new={model_type="granite", vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
		num_key_value_heads=1, embedding_multiplier=12.0, tie_word_embeddings=false}`
	if _, err := run(1, strings.Join(strings.Fields(model), " "), "train.steps=1", "checkpoint.every=0"); err != nil {
		t.Fatal(err)
	}
	// Of the sequences, one alone has the token whose embedding is Inf in the passes.
	base, bad := filepath.Join(dir, "out", "model"), filepath.Join(dir, "bad")
	if err := os.CopyFS(bad, os.DirFS(base)); err != nil {
		t.Fatal(err)
	}
	const file = "model.safetensors"
	writeTensors(t, filepath.Join(base, file), filepath.Join(bad, file),
		func(name string, shape []int64, x []float32) []int64 {
			if name == "model.embed_tokens.weight" {
				x['Z'*shape[1]] = 1e38 // 12 times as much is Inf
			}
			return shape
		})
	text := []byte(strings.Repeat("the cat sat on the mat, and the dog sat on the log. ", 40))
	text[5*48+7] = 'Z'
	put(t, filepath.Join(dir, "a.txt"), string(text))
	put(t, filepath.Join(dir, "job.toml"), "seed = 5\n[model]\npath = \"bad\"\n"+kept[strings.Index(kept, "[data]"):])
	sets := []string{"train.on_nan=skip", "data.shuffle=false", "output.model=false", "output.overwrite=true"}
	if _, err := run(2, sets...); err != nil {
		t.Fatal(err)
	}
	want := losses(t, dir)
	if len(want) != 6 || want[1] != 0 || slices.Contains(slices.Delete(slices.Clone(want), 1, 2), 0) {
		t.Fatalf("losses %v; the second alone should be NaN, which is null", want)
	}
	drop(t, dir, 6)
	if _, err := run(2, sets...); err != nil {
		t.Fatal(err)
	}
	if got := losses(t, dir); !slices.Equal(got, want) {
		t.Errorf("losses %v after a resume, %v without", got, want)
	}
}
