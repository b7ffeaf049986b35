package job

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/job/plan"
	"ulysses/tensor"
)

// The resolved job of the report is a job file that reads as the same job. It has the values of
// --set and of the program, and comes before the job file's text.
func TestResolvedJob(t *testing.T) {
	dir, run := newKept(t, "checkpoint.every=0", `model.new.rope_parameters={rope_theta=5e4, rope_type="default"}`,
		"optimizer.lr=2e-3", "train.epochs=2", "train.steps=0")
	if _, err := run(4, "parallel.ulysses=0"); err != nil {
		t.Fatal(err)
	}
	page := text(t, filepath.Join(dir, "out", "report.html"))
	if a, b := strings.Index(page, `<pre id="resolved">`), strings.Index(page, `<pre id="written">`); a < 0 || b < a {
		t.Errorf("the job as it was run at %d, the file at %d", a, b)
	}
	resolved := ""
	for _, line := range strings.Split(page[strings.Index(page, `<pre id="resolved">`):], "\n") {
		if resolved += line + "\n"; strings.Contains(line, "</pre>") {
			break
		}
	}
	resolved = strings.NewReplacer(`<pre id="resolved">`, "", "</pre>", "", "&#34;", `"`).Replace(resolved)
	for _, want := range []string{"lr = 0.002  # by --set", "ulysses = 1  # chosen by the program: --set has 0",
		"accumulate = 1  # chosen by the program", "warmup = 2.0\n", "[model.new]"} {
		if !strings.Contains(resolved, want) {
			t.Errorf("no %q in\n%s", want, resolved)
		}
	}
	// train.steps replaces train.epochs
	resolved = regexp.MustCompile(`(?m)^epochs.*$`).ReplaceAllString(resolved, "")
	j, err := file.Parse([]byte(resolved), "job.toml", nil, os.LookupEnv)
	if err != nil {
		t.Fatalf("%v\n%s", err, resolved)
	}
	if j.Optimizer.LR != 2e-3 || j.Parallel.Ulysses != 1 || j.Train.Steps < 2 || j.Data.Sequence != 48 || j.Seed != 5 ||
		!reflect.DeepEqual(j.Model.New["rope_parameters"],
			map[string]any{"rope_theta": 5e4, "rope_type": "default"}) || j.Model.New["hidden_size"] != int64(24) {
		t.Errorf("%+v", j)
	}
}

// The cards show the time and memory of a run, its share of the machine's peak, and its commit.
// Correct traffic has no card.
func TestCards(t *testing.T) {
	dir, run := newKept(t, "checkpoint.every=0")
	if _, err := run(2); err != nil {
		t.Fatal(err)
	}
	page := text(t, filepath.Join(dir, "out", "report.html"))
	cards := page[strings.Index(page, `aria-label="in short"`):strings.Index(page, `<section id="curves"`)]
	tokens := int64(0)
	for _, m := range regexp.MustCompile(`"tokens":(\d+)`).FindAllStringSubmatch(
		text(t, filepath.Join(dir, "out", "metrics.jsonl")), -1) {
		n, _ := strconv.ParseInt(m[1], 10, 64)
		tokens += n
	}
	for _, want := range []string{"<span>tokens</span><b>" + units.Grouped(tokens) + "</b>", "<span>elapsed</span>",
		"<span>commit</span>", "<span>tokens/s</span>", "<span>model FLOP/s</span>"} {
		if !strings.Contains(cards, want) {
			t.Errorf("no %q in %s", want, cards)
		}
	}
	if footer := page[strings.Index(page, "<footer>"):]; strings.Contains(cards, "traffic") ||
		!strings.Contains(footer, "traffic: equal") {
		t.Errorf("traffic: %s", footer)
	}
	cpu := &plan.Machine{Info: device.Info{Place: tensor.Host}, Peak: 40e9}
	if share, of := cpu.ShareOfPeak(10e9); share != 0.25 ||
		of != "of 40 GFLOP/s a rank: matrix products, as measured after the run" {
		t.Errorf("%v %q", share, of)
	}
	gpu := &plan.Machine{Info: device.Info{Place: tensor.CUDA, Name: "NVIDIA H200"},
		Rates: dryrun.Rates{Products: 700e12}}
	if share, of := gpu.ShareOfPeak(350e12); share != 0.5 ||
		of != "of 700 TFLOP/s a rank: matrix products, published for NVIDIA H200" {
		t.Errorf("%v %q", share, of)
	}
	for _, none := range []*plan.Machine{{}, {Info: device.Info{Place: tensor.CUDA, Name: "GPU"}}} {
		if share, of := none.ShareOfPeak(1e9); share != 0 || of != "" {
			t.Errorf("%v %q", share, of)
		}
	}
}
