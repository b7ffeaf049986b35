package job

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// logOf runs the job and returns its log.
func logOf(dir string, ranks int, sets ...string) (string, error) {
	var log bytes.Buffer
	err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: sets, Ranks: ranks, Stdout: io.Discard,
		Stderr: &log})
	return log.String(), err
}

// A resumed run may have other sequences if checkpoint.accept says so. The steps go on, the data go
// on after the share of the epoch that the first stage has read, and the manifest records both.
func TestStages(t *testing.T) {
	for _, ranks := range []int{1, 2, 4} {
		longer := []string{"train.steps=8", "data.sequence=96", "data.global_batch=2", "data.shuffle=false",
			"optimizer.schedule=constant"}
		short := []string{"train.steps=4", "data.shuffle=false", "optimizer.schedule=constant"}
		dir, run := newKept(t)
		if _, err := run(ranks, short...); err != nil {
			t.Fatal(err)
		}
		before := losses(t, dir)
		_, err := run(ranks, longer...)
		expectFault(t, err, status.InvalidConfig,
			[]string{"is of another run", "data.sequence is 96, it was 48", "global batch is 2, it was 4",
				`set checkpoint.accept = ["data.sequence", "data.global_batch"]`})
		_, err = run(ranks, append([]string{"checkpoint.accept=data.sequence"}, longer...)...)
		expectFault(t, err, status.InvalidConfig, []string{`set checkpoint.accept = ["data.global_batch"]`})
		accept := `checkpoint.accept=["data.sequence", "data.global_batch"]`
		_, err = run(ranks, append([]string{accept, "seed=6"}, longer...)...)
		expectFault(t, err, status.InvalidConfig, []string{"seed is 6, it was 5", "data.sequence is 96"})
		log, err := logOf(dir, ranks, append([]string{accept}, longer...)...)
		if err != nil {
			t.Fatal(err)
		}
		// 16 of 44 sequences of 48 tokens are 8 of 22 of 96
		for _, words := range []string{"a new stage begins after step 4",
			"data.sequence is 96, it was 48; a step has 2 sequences, it had 4", "sequence 9 of 22 of epoch 1",
			"optimizer's moments", "learning rate of step 5 is 0.003; that of step 4 was 0.003"} {
			if !strings.Contains(log, words) {
				t.Errorf("the log does not say %q:\n%s", words, log)
			}
		}
		got := losses(t, dir)
		if len(got) != 8 || !slices.Equal(got[:4], before) {
			t.Fatalf("losses %v, before %v", got, before)
		}
		// the record of the stages, and a stage that is resumed without checkpoint.accept
		drop(t, dir, 8)
		if _, err := run(ranks, longer...); err != nil || !slices.Equal(losses(t, dir), got) {
			t.Errorf("resumed within the second stage: %v, losses %v, want %v", err, losses(t, dir), got)
		}
		var m struct {
			Stages []struct {
				Step, First, Sequence, Sequences int64
				GlobalBatch                      int64 `json:"global_batch"`
			}
		}
		text, err := os.ReadFile(filepath.Join(dir, "out", "checkpoints", "step-00000008", "manifest.json"))
		if err == nil {
			err = json.Unmarshal(text, &m)
		}
		if want := "{[{0 0 48 44 4} {4 8 96 22 2}]}"; err != nil || fmt.Sprint(m) != want {
			t.Errorf("%v: stages %v, want %s", err, m, want)
		}
		_, err = run(ranks, append([]string{"train.epochs=3", "train.steps=0"}, longer[1:]...)...)
		expectFault(t, err, status.InvalidConfig, []string{"train.epochs", "several stages", "set train.steps"})
	}
}

// The second stage computes what a job that only has its data, its weights and its moments would:
// after four steps on the first tokens, the steps on the tokens that follow. The job of the
// comparison has these tokens in a file of its own and starts from the same checkpoint.
func TestStageData(t *testing.T) {
	text := make([]byte, 44*48)
	for i := range text {
		text[i] = byte(' ' + (i*i/7+i*31)%90)
	}
	base := []string{"data.shuffle=false", "optimizer.schedule=constant", "output.model=false"}
	first := append([]string{"train.steps=4"}, base...)
	dir, run := newKept(t, first...)
	put(t, filepath.Join(dir, "a.txt"), string(text))
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	other, runOther := newKept(t, first...)
	put(t, filepath.Join(other, "a.txt"), string(text))
	if _, err := runOther(1); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(other, "rest.txt"), string(text[16*48:]))
	if _, err := run(2, "train.steps=7", "data.sequence=96", "data.global_batch=2",
		`checkpoint.accept=["data.sequence", "data.global_batch"]`); err != nil {
		t.Fatal(err)
	}
	sets := []string{"train.steps=7", "data.sequence=96", "data.global_batch=2",
		"data.path=" + filepath.Join(other, "rest.txt")}
	_, err := runOther(1, append(sets, `checkpoint.accept=["data.sequence", "data.global_batch"]`)...)
	expectFault(t, err, status.InvalidConfig, []string{"data.path is ", "rest.txt", `"data.path"`})
	if _, err := runOther(1,
		append(sets, `checkpoint.accept=["data.sequence", "data.global_batch", "data.path"]`)...); err != nil {
		t.Fatal(err)
	}
	a, b := losses(t, dir), losses(t, other)
	for i := range a {
		if !(math.Abs(a[i]-b[i]) < 2e-5) {
			t.Errorf("step %d: loss %v, with the rest of the tokens in a file %v", i+1, a[i], b[i])
		}
	}
	if len(a) != 7 || a[4] == a[3] {
		t.Error(a)
	}
}

// A stage with other lengths of the same conversations trains the same tokens of them.
func TestStageOfConversations(t *testing.T) {
	dir, run := newKept(t, "train.steps=2", "optimizer.schedule=constant", "output.model=false", "data.path=chat.jsonl")
	t.Chdir(dir)
	put(t, "chat.jsonl", strings.Repeat(
		`{"messages": [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": "An answer."}]}`+"\n", 60))
	put(t, "t.jinja", "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
	sets := []string{"data.chat_template=t.jinja"}
	if _, err := run(1, sets...); err != nil {
		t.Fatal(err)
	}
	sets = append(sets, "train.steps=3", "data.sequence=96", `checkpoint.accept=["data.sequence", "train.steps"]`)
	_, err := run(1, append(sets, "data.train_on=all")...)
	expectFault(t, err, status.InvalidConfig, []string{"is of another run: data.path is ", "conversations"})
	if _, err := run(1, sets...); err != nil {
		t.Fatal(err)
	}
}

// The positions and the RoPE of the model may change with data.sequence, the model itself may not.
func TestStagePositions(t *testing.T) {
	limits := []string{"model.new.max_position_embeddings=48", "optimizer.schedule=constant"}
	dir, run := newKept(t, limits...)
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	_, err := run(2, "train.steps=8", "data.sequence=96", "checkpoint.accept=data.sequence")
	expectFault(t, err, status.InvalidConfig,
		[]string{"data.sequence: 96, the model has 48 positions", "max_position_embeddings = 96"})
	longer := []string{"train.steps=8", "data.sequence=96", "model.new.max_position_embeddings=96",
		`model.new.rope_scaling={rope_type="yarn", factor=2.0, original_max_position_embeddings=48}`}
	_, err = run(2, longer...)
	expectFault(t, err, status.InvalidConfig,
		[]string{"the model has 96 positions with RoPE yarn, theta 10000, Factor 2, ",
			"it had 48 positions with RoPE default, theta 10000", `checkpoint.accept = ["data.sequence"]`})
	accept := "checkpoint.accept=data.sequence"
	_, err = run(2, append([]string{accept, "model.new.rms_norm_eps=1e-3"}, longer...)...)
	expectFault(t, err, status.InvalidConfig, []string{"rms_norm_eps of the model is 0.001, it was "})
	if _, err = run(2, append([]string{accept}, longer...)...); err != nil {
		t.Fatal(err)
	}
	if n := len(losses(t, dir)); n != 8 {
		t.Errorf("%d steps", n)
	}
	config, err := os.ReadFile(filepath.Join(dir, "out", "model", "config.json"))
	if err != nil || !strings.Contains(string(config), `"max_position_embeddings": 96`) ||
		!strings.Contains(string(config), "yarn") {
		t.Errorf("%v: %s", err, config)
	}
	exported := filepath.Join(dir, "exported")
	if err := export(Options{words: []string{filepath.Join(dir, "out", "checkpoints"), exported}, Stdout: io.Discard,
		Stderr: io.Discard}); err != nil {
		t.Fatal(err)
	}
	if again, err := os.ReadFile(filepath.Join(exported, "config.json")); err != nil || !bytes.Equal(again, config) {
		t.Errorf("%v: the exported model has %s, the run's %s", err, again, config)
	}
}
