package job

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/plan"
)

// sampleLine is a line of the log with a sample.
type sampleLine struct {
	Message, Prompt, Text string
	Step, Tokens          int64
}

// sampled runs a job and returns the samples in its log.
func sampled(t *testing.T, dir string, open opener, ranks int, sets ...string) (all []sampleLine) {
	t.Helper()
	var log bytes.Buffer
	if err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: sets, Ranks: ranks, Stdout: io.Discard,
		Stderr: &log, log: "json", open: open}); err != nil {
		t.Fatal(err, log.String())
	}
	for line := range bytes.Lines(log.Bytes()) {
		var x sampleLine
		if err := json.Unmarshal(line, &x); err != nil {
			t.Fatal(err)
		}
		if x.Message == "sample" {
			all = append(all, x)
		}
	}
	return all
}

// stepLosses returns the losses of the steps, without the lines of evaluations.
func stepLosses(t *testing.T, dir string) (all []float64) {
	t.Helper()
	for _, r := range readMetrics(t, filepath.Join(dir, "out", "metrics.jsonl")) {
		if r.TargetTokens > 0 {
			all = append(all, r.Loss)
		}
	}
	if len(all) != 6 {
		t.Fatalf("losses %v", all)
	}
	return all
}

// Samples are equal on every mesh and ZeRO stage, also with frozen parameters and adapters, and
// equal to the text that the verb generate writes with the model at the end. They change nothing in
// the run.
func TestSamples(t *testing.T) {
	sets := []string{"eval.split=0.2", "eval.every=3", `eval.sample=["the cat ", "and"]`, "eval.sample_tokens=12",
		"optimizer.lr=1e-2"}
	models, err := filepath.Abs("../testdata/goldens/models/qwen3_5")
	if err != nil {
		t.Fatal(err)
	}
	pretrained := []string{"model.new={}", "model.path=" + models, "data.tokenizer=bytes", "data.sequence=40",
		"optimizer.lr=5e-2"}
	for name, more := range map[string][]string{
		"all":    {"eval.sample_temperature=1"},
		"freeze": append([]string{`train.freeze=["*embed_tokens*", "*.mlp.*"]`}, pretrained...),
		"lora":   append([]string{"lora.rank=3"}, pretrained...),
	} {
		var want []sampleLine
		for _, mesh := range [][]string{{"1"}, {"2", "parallel.ulysses=2"},
			{"4", "parallel.ulysses=2", "parallel.zero=3"}, {"2", "parallel.ulysses=1", "parallel.zero=1"}} {
			dir, _ := newKept(t)
			var ranks int
			fmt.Sscan(mesh[0], &ranks)
			all := append(append(slices.Clone(sets), more...), mesh[1:]...)
			got := sampled(t, dir, opener{}, ranks, all...)
			if want == nil {
				want = got
			}
			if !slices.Equal(got, want) || len(got) != 4 || got[0].Step != 3 || got[3].Step != 6 ||
				got[3].Prompt != "and" || got[3].Tokens != 12 {
				t.Errorf("%s, %v: samples %+v, on one rank %+v", name, mesh, got, want)
			}
			page, err := os.ReadFile(filepath.Join(dir, "out", "report.html"))
			if err != nil || !strings.Contains(string(page), "Samples (eval.sample)") ||
				!strings.Contains(string(page), "<b>the cat </b>") ||
				!strings.Contains(string(page), "weights of eval.sample") {
				t.Errorf("%s, %v: report.html does not show the samples: %v", name, mesh, err)
			}
			if name != "lora" {
				temperature := map[string]string{"all": "1", "freeze": "0"}[name]
				code, out, errs := call("generate", filepath.Join(dir, "out", "model"), "the cat ", "--max-tokens",
					"12", "-q", "--temperature", temperature, "--seed", "5")
				if code != status.OK || strings.ToValidUTF8(out, "\uFFFD") != got[2].Text+"\n" {
					t.Errorf("%s, %v: generate writes %q, the sample is %q: %v %s", name, mesh, out, got[2].Text,
						code, errs)
				}
			}
			with := stepLosses(t, dir)
			dir, run := newKept(t)
			if _, err := run(ranks, append(all, "eval.sample=[]")...); err != nil {
				t.Fatal(err)
			}
			if without := stepLosses(t, dir); !slices.Equal(with, without) {
				t.Errorf("%s, %v: losses %v, without samples %v", name, mesh, with, without)
			}
		}
		if want[0].Text == want[1].Text || want[0].Text == want[2].Text {
			t.Errorf("%s: the samples are alike: %+v", name, want)
		}
	}
}

// Samples are drawn on devices whose memory the host cannot read, in an evaluation as well, and by
// a temperature with the seed of the job.
func TestSamplesOnALateDevice(t *testing.T) {
	dir, _ := newKept(t)
	sets := []string{"eval.split=0.2", `eval.sample=["the cat ", "and"]`, "eval.sample_tokens=12", "optimizer.lr=1e-2",
		"device.backend=auto", "device.dtype=f32"}
	here := sampled(t, dir, opener{}, 2, append(sets, "device.backend=cpu")...)
	for _, zero := range []string{"0", "3"} {
		there, _ := newKept(t)
		if got := sampled(t, there, late(), 2, append(sets, "parallel.zero="+zero)...); !slices.Equal(got, here) {
			t.Errorf("zero %s: %+v, on the CPU %+v", zero, got, here)
		}
		evaluated := sampled(t, there, late(), 2,
			append(sets, "parallel.zero="+zero, "kind=eval",
				"checkpoint.resume="+filepath.Join(there, "out", "checkpoints"))...)
		for i := range evaluated {
			if evaluated[i].Text != here[i].Text || evaluated[i].Step != 0 {
				t.Errorf("zero %s: %+v, after the last step %+v", zero, evaluated[i], here[i])
			}
		}
		if len(evaluated) != 2 {
			t.Error(evaluated)
		}
	}
	drawn := append(sets, "kind=eval", "device.backend=cpu", "eval.sample_temperature=2",
		"checkpoint.resume="+filepath.Join(dir, "out", "checkpoints"))
	a, b, c := sampled(t, dir, opener{}, 1, drawn...), sampled(t, dir, opener{}, 2, drawn...),
		sampled(t, dir, opener{}, 1, append(drawn, "seed=6")...)
	if !slices.Equal(a, b) || a[0].Text == here[0].Text || a[0].Text == c[0].Text {
		t.Errorf("drawn %+v, on two ranks %+v, with another seed %+v, the most probable %+v", a, b, c, here)
	}
}

// With eval.sample_chat, a prompt is put into the chat template.
func TestSamplesOfConversations(t *testing.T) {
	template := filepath.Join(t.TempDir(), "chat.jinja")
	if err := os.WriteFile(template,
		[]byte("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} cat {% endif %}"),
		0o600); err != nil {
		t.Fatal(err)
	}
	sets := []string{"eval.split=0.2", "eval.every=3", "eval.sample_tokens=12", "optimizer.lr=1e-2"}
	dir, _ := newKept(t)
	want := sampled(t, dir, opener{}, 1, append(sets, `eval.sample=["the cat "]`)...)
	dir, _ = newKept(t)
	got := sampled(t, dir, opener{}, 2,
		append(sets, `eval.sample=["the"]`, "eval.sample_chat=true", "data.chat_template="+template)...)
	for i := range want {
		if len(got) != len(want) || got[i].Text != want[i].Text || got[i].Prompt != "the" {
			t.Errorf("%+v, want the texts of %+v", got, want)
		}
	}
	_, run := newKept(t)
	if _, err := run(1, append(sets, `eval.sample=["the"]`, "eval.sample_chat=true")...); status.Of(
		err) != status.InvalidConfig || !strings.Contains(err.Error(),
		"eval.sample_chat: there is no chat template; set data.chat_template") {
		t.Error(err)
	}
}

// Prompts without tokens, without room and without an evaluation are refused before the first step.
func TestSampleFaults(t *testing.T) {
	dir, run := newKept(t)
	for _, x := range []struct {
		sets []string
		want string
	}{
		{[]string{`eval.sample=["a"]`}, "there is nothing to evaluate"},
		{[]string{`eval.sample=["a", ""]`, "eval.split=0.2"}, "has an empty prompt"},
		{[]string{`eval.sample=["abc"]`, "eval.split=0.2", "eval.sample_tokens=3000"},
			"3000 tokens after a prompt of 3, and the model has 2048 positions; set eval.sample_tokens = 2045"},
	} {
		_, err := run(2, x.sets...)
		expectFault(t, err, status.InvalidConfig, []string{x.want})
	}
	if _, err := os.Stat(filepath.Join(dir, "out", "metrics.jsonl")); err == nil {
		t.Error("a refused job wrote metrics.jsonl")
	}
}

// The plan of rank 0 has the memory of the run: the copy of the weights, the decoder, and the copy
// of the training state for checkpoint.best.
func TestPlanOfSamples(t *testing.T) {
	dir, _ := newKept(t)
	sets := []string{"eval.split=0.2", "eval.every=3", `eval.sample=["the cat "]`, "checkpoint.best=true",
		"checkpoint.every=0", "device.backend=cpu", "parallel.zero=2"}
	err := onRanks(Options{Path: filepath.Join(dir, "job.toml"), Sets: sets, Ranks: 2, Stdout: io.Discard,
		Stderr: io.Discard}, func(e *Env) error {
		s, err := prepare(e, true)
		if err != nil {
			return err
		}
		defer s.close()
		x, err := plan.SubjectOf(e.Job)
		if err != nil {
			return err
		}
		f, err := plan.PredictRank(e.Job, anyMachine(e.Device, 2), x, e.Mesh.World.Rank(), false)
		if err != nil {
			return err
		}
		defer f.Close()
		if e.Mesh.World.Rank() > 0 { // which does not generate
			if len(s.trainer.Components()) != len(f.Memory)-2 {
				t.Errorf("rank 1: planned %v, allocated %v", f.Memory, s.trainer.Components())
			}
			return nil
		}
		if got := s.trainer.Components(); !slices.Equal(got, f.Memory) || len(got) < 6 {
			t.Errorf("planned %v, allocated %v", f.Memory, got)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
