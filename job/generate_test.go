package job

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Ranks that divide the layers write the text of one rank, greedy and drawn.
func TestGenerateOnRanks(t *testing.T) {
	for _, model := range []string{"qwen3", "qwen3_5", "llama"} {
		folder := filepath.Join("../testdata/goldens/models", model)
		for _, more := range [][]string{{}, {"--temperature", "1.5", "--seed", "3"},
			{"--temperature", "1", "--top-k", "9", "--dtype", "bf16"}} {
			args := append([]string{"generate", folder, "the cat sat on", "--max-tokens", "20", "-q"}, more...)
			code, want, errs := call(args...)
			if code != status.OK || len(want) < 2 {
				t.Fatalf("%v: %v %s", args, code, errs)
			}
			if code, got, errs := call(append(args, "-n", "2")...); code != status.OK || got != want {
				t.Errorf("%v: %q on two ranks, %q on one: %v %s", args, got, want, code, errs)
			}
		}
	}
	folder := filepath.Join("../testdata/goldens/models", "qwen3")
	for _, x := range []struct {
		args []string
		want string
	}{
		{[]string{"-n", "9"}, "generate: 9 ranks, and the model has "},
		{[]string{"-n", "2", "--max-tokens", "100000"}, " positions of the model"},
		{[]string{"--max-tokens", strconv.Itoa(math.MaxInt64)}, " positions of the model"},
	} {
		if code, _, errs := call(append([]string{"generate", folder, "a"},
			x.args...)...); code != status.InvalidArgument ||
			strings.Count(errs, x.want) != 1 {
			t.Errorf("%v: %v %s", x.args, code, errs)
		}
	}
	if code, _, errs := call("generate", t.TempDir(), "a", "-n", "2"); code == status.OK ||
		!strings.Contains(errs, "config.json") {
		t.Errorf("%v %s", code, errs)
	}
}

// With --chat the prompt is what the chat template makes of it.
func TestGenerateChat(t *testing.T) {
	folder := t.TempDir()
	if err := os.CopyFS(folder, os.DirFS("../testdata/goldens/models/qwen3")); err != nil {
		t.Fatal(err)
	}
	args := []string{"--max-tokens", "12", "-q"}
	generate := func(words ...string) string {
		t.Helper()
		code, out, errs := call(append(append([]string{"generate", folder}, words...), args...)...)
		if code != status.OK {
			t.Fatalf("%v: %v %s", words, code, errs)
		}
		return out
	}
	if code, _, errs := call("generate", folder, "a", "--chat"); code != status.InvalidConfig ||
		!strings.Contains(errs, "leave out --chat") {
		t.Errorf("%v %s", code, errs)
	}
	const template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<{{ who or 'assistant' }}>{% endif %}"
	if err := os.WriteFile(filepath.Join(folder, "chat_template.jinja"), []byte(template), 0o600); err != nil {
		t.Fatal(err)
	}
	for asked, text := range map[string]string{
		"the cat":      "<user>the cat<assistant>",
		"{\"a\": 1}\n": "<user>{\"a\": 1}<assistant>",
		`{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "chat_template_kwargs": {"who": "me"}}`: "<system>s<user>u<me>",
	} {
		if got, want := generate(asked, "--chat"), generate(text); got != want {
			t.Errorf("%s: %q, want %q", asked, got, want)
		}
		if got, want := generate(asked, "--chat", "-n", "2"), generate(text); got != want {
			t.Errorf("%s on two ranks: %q, want %q", asked, got, want)
		}
	}
	if code, _, errs := call("generate", folder, `{"messages": []}`, "--chat"); code != status.InvalidArgument ||
		!strings.Contains(errs, "the conversation is empty") {
		t.Errorf("%v %s", code, errs)
	}
	// Errors name the file, and no key of a job.
	path := filepath.Join(folder, "chat_template.jinja")
	for _, broken := range []string{"{% if %}", "{{ raise_exception('no') }}"} {
		if err := os.WriteFile(path, []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, errs := call("generate", folder, "a", "--chat"); !strings.Contains(errs, path+": ") ||
			strings.Contains(errs, "data.") {
			t.Errorf("%s: %s", broken, errs)
		}
	}
}

// generate names the model in the output.dir of a run, and says if there is no folder.
func TestGenerateFaults(t *testing.T) {
	dir, run := newKept(t)
	if _, err := run(1); err != nil {
		t.Fatal(err)
	}
	out, none := filepath.Join(dir, "out"), filepath.Join(dir, "none")
	step := filepath.Join(out, "checkpoints", "step-00000006")
	for folder, want := range map[string]string{
		out:  out + ": no config.json here; name " + filepath.Join(out, "model"),
		none: "there is no folder " + none + "; give a Hugging Face folder",
		step: step + ": no config.json here; write the model of its checkpoint with ulysses-mpi export " + step,
	} {
		for _, words := range [][]string{{"the"}, {"the", "--chat"}} {
			code, _, errs := call(append([]string{"generate", folder}, words...)...)
			if code != status.IO || !strings.Contains(errs, want) {
				t.Errorf("%s %q: %v: %s", folder, words, code, errs)
			}
		}
	}
}

// A generation_config.json with which nothing sensible is drawn is refused, as in transformers. It
// counts only if it draws. Fields that would change a text and have no effect here are named.
func TestGenerationConfigFaults(t *testing.T) {
	folder := t.TempDir()
	if err := os.CopyFS(folder, os.DirFS("../testdata/goldens/models/qwen3")); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct{ text, want, warned string }{
		{`{"do_sample": true, "temperature": -1.0}`, "temperature = -1; set 0 or more", ""},
		{`{"do_sample": true, "top_p": 0}`, "top_p = 0; set a number above 0 and at most 1", ""},
		{`{"do_sample": true, "top_p": 1.5}`, "top_p = 1.5; set a number above 0 and at most 1", ""},
		{`{"do_sample": true, "top_k": -3}`, "top_k = -3; set 0 or more", ""},
		{`{"temperature": -1.0}`, "", ""},
		{`{"do_sample": true, "temperature": 0.5, "top_p": 1, "top_k": 0}`, "", ""},
		{`{"repetition_penalty": 1, "min_p": null, "num_beams": 1, "bad_words_ids": [], "typical_p": 1.0, "max_new_tokens": 9}`,
			"", ""},
		{`{"repetition_penalty": 1.05, "suppress_tokens": [3, 4], "min_length": 0, "min_p": 0.1}`, "",
			"WRN generation_config.json: repetition_penalty = 1.05, suppress_tokens = [3,4]: no effect here\n"},
		{`{"do_sample": true, "temperature": 0, "min_p": 0.1}`, "",
			"WRN generation_config.json: min_p = 0.1: no effect here\n"},
	} {
		if err := os.WriteFile(filepath.Join(folder, "generation_config.json"), []byte(x.text), 0o600); err != nil {
			t.Fatal(err)
		}
		want := status.OK
		if x.want != "" {
			want = status.InvalidConfig
		}
		code, _, errs := call("generate", folder, "the", "--max-tokens", "2", "-q")
		if code != want || !strings.Contains(errs, x.want) || want != status.OK &&
			!strings.Contains(errs, "generation_config.json: ") {
			t.Errorf("%s: %v %s", x.text, code, errs)
		}
		if x.want == "" && !strings.HasSuffix(errs, x.warned) || x.warned == "" && strings.Contains(errs, "no effect") {
			t.Errorf("%s: %s", x.text, errs)
		}
	}
}

// The ids of generation_config.json end a text, or the ids of config.json if there is no
// generation_config.json, as in transformers.
func TestGenerateEnds(t *testing.T) {
	folder := t.TempDir()
	if err := os.CopyFS(folder, os.DirFS("../testdata/goldens/models/qwen3")); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(folder, "config.json")
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	generate := func() string {
		t.Helper()
		code, out, errs := call("generate", folder, "the", "--max-tokens", "9", "-q")
		if code != status.OK {
			t.Fatalf("%v %s", code, errs)
		}
		return strings.TrimSuffix(out, "\n")
	}
	all := generate()
	ids := make([]string, 256)
	for i := range ids {
		ids[i] = strconv.Itoa(i)
	}
	every := `"eos_token_id": [` + strings.Join(ids, ", ") + "]"
	put(t, config, strings.Replace(string(text), `"eos_token_id": null`, every, 1))
	if got := generate(); len(got) >= len(all) {
		t.Errorf("with ends in config.json: %q, without: %q", got, all)
	}
	put(t, filepath.Join(folder, "generation_config.json"), "{}")
	if got := generate(); got != all {
		t.Errorf("%q with an empty generation_config.json, want %q", got, all)
	}
}
