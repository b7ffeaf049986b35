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

	"golang.org/x/net/html"

	"ulysses/comm"
	"ulysses/internal/status"
	vers "ulysses/internal/version"
)

// pageChart is a chart in the form that the page's script reads.
type pageChart struct {
	Title  string `json:"title"`
	Series []struct {
		X []float64  `json:"x"`
		Y []*float64 `json:"y"`
	} `json:"series"`
}

// reportPage is the content of report.html.
type reportPage struct {
	charts  []pageChart
	text    map[string]string // of each section, by id
	tables  map[string][][]string
	scripts int
	images  int
}

func readReport(t *testing.T, path string) *reportPage {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	root, err := html.Parse(strings.NewReader(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	p := &reportPage{text: map[string]string{}, tables: map[string][][]string{}}
	policy := false
	var walk func(n *html.Node, section string)
	walk = func(n *html.Node, section string) {
		for _, a := range n.Attr {
			switch {
			case n.Data == "section" && a.Key == "id":
				section = a.Val
			case (a.Key == "src" || a.Key == "href" || a.Key == "data" || a.Key == "action") &&
				!strings.HasPrefix(a.Val, "#"):
				t.Errorf("<%s %s=%q> is fetched from elsewhere", n.Data, a.Key, a.Val)
			case strings.HasPrefix(a.Key, "on"):
				t.Errorf("<%s %s=%q>: no such attribute is ours", n.Data, a.Key, a.Val)
			case a.Key == "content" && strings.Contains(a.Val, "default-src 'none'"):
				policy = true
			}
		}
		switch {
		case n.Type == html.ElementNode && n.Data == "script":
			p.scripts++
			if code := n.FirstChild.Data; strings.HasPrefix(code, "const charts = ") {
				if err := json.Unmarshal([]byte(strings.TrimSuffix(strings.TrimPrefix(code, "const charts = "), ";")),
					&p.charts); err != nil {
					t.Errorf("charts: %v in %s", err, code)
				}
			}
			return
		case n.Type == html.ElementNode && n.Data == "style" &&
			(strings.Contains(n.FirstChild.Data, "@import") || strings.Contains(n.FirstChild.Data, "url(")):
			t.Error("the style fetches something")
		case n.Type == html.ElementNode &&
			(n.Data == "img" || n.Data == "iframe" || n.Data == "link" || n.Data == "object"):
			p.images++
		case n.Type == html.TextNode && n.Parent.Data != "style":
			p.text[section] += n.Data
		case n.Type == html.ElementNode && n.Data == "tr":
			var cells []string
			for c := n.FirstChild; c != nil; c = c.NextSibling {
				cells = append(cells, strings.TrimSpace(textOf(c)))
			}
			p.tables[section] = append(p.tables[section], cells)
		}
		for c := n.FirstChild; c != nil; c = c.NextSibling {
			walk(c, section)
		}
	}
	walk(root, "")
	if !policy || p.scripts != 2 || p.images != 0 {
		t.Errorf("%s: policy %v, %d scripts, %d images", path, policy, p.scripts, p.images)
	}
	for _, id := range []string{"curves", "time", "memory", "traffic", "job", "environment"} {
		if p.text[id] == "" {
			t.Errorf("%s: no section %s", path, id)
		}
	}
	return p
}

func textOf(n *html.Node) string {
	if n.Type == html.TextNode {
		return n.Data
	}
	text := ""
	for c := n.FirstChild; c != nil; c = c.NextSibling {
		text += textOf(c)
	}
	return text
}

// row returns the row of a section's table whose first cells are the given ones.
func (p *reportPage) row(section string, cells ...string) []string {
	for _, r := range p.tables[section] {
		if len(r) >= len(cells) && slices.Equal(r[:len(cells)], cells) {
			return r
		}
	}
	return make([]string, 9)
}

// The report of a run has the numbers of metrics.jsonl, of the ledger and of the plan. It loads
// nothing from other files, and text from outside is escaped.
func TestReport(t *testing.T) {
	t.Setenv("SLURM_JWT", "hunter2")
	t.Setenv("SLURM_JOB_NAME", "<b>bold</b>")
	dir, run := newKept(t, "checkpoint.every=0", "eval.split=0.2", "eval.every=2")
	odd := `x<img src=x onerror=alert(1)><script>.txt`
	put(t, filepath.Join(dir, odd), strings.Repeat("the cat sat on the mat. ", 90))
	out, err := run(4, "parallel.ulysses=2", "parallel.zero=3",
		`data.path=[`+fmt.Sprintf("%q", filepath.Join(dir, odd))+`]`)
	if err != nil || !strings.Contains(out, filepath.Join("out", "report.html")) {
		t.Fatal(err, out)
	}
	p := readReport(t, filepath.Join(dir, "out", "report.html"))
	lines := readMetrics(t, filepath.Join(dir, "out", "metrics.jsonl"))
	var names []string
	for _, c := range p.charts {
		names = append(names, c.Title)
		if c.Title == "Loss" &&
			(len(c.Series) != 2 || len(c.Series[0].X) != 6 || *c.Series[0].Y[5] != last(lines).Loss ||
				!slices.Equal(c.Series[1].X, []float64{2, 4, 6})) {
			t.Errorf("losses %+v", c.Series)
		}
	}
	if !slices.Equal(names, []string{"Loss", "Gradient norm", "Learning rate", "Speed", "Model FLOP/s"}) {
		t.Errorf("charts %v", names)
	}
	for _, op := range [][2]string{{"sequence", comm.OpAllToAll}, {"world", comm.OpAllGather},
		{"world", comm.OpReduceScatter}} {
		if r := p.row("traffic", op[0], op[1]); r[3] != r[4] || len(r[3]) < 4 || r[5] != "equal" {
			t.Errorf("traffic of %v: %q", op, r)
		}
	}
	if r := p.row("traffic", "all", "control"); r[4] != "–" || r[5] != "" || r[3] == "0" {
		t.Errorf("control: %q", r)
	}
	if r := p.row("memory", "activations"); r[1] != r[3] || r[4] != "1.00" {
		t.Errorf("activations: %q", r)
	}
	for section, want := range map[string][]string{
		"":            {"finished all 6 steps", "qwen3", "ZeRO stage 3"},
		"time":        {"rank 3", "attention", "communication"},
		"job":         {"hidden_size = 24", odd, "parallel.zero=3", "optimizer.lr"},
		"environment": {"4 × ", "<b>bold</b>", "not shown", "ulysses-mpi " + vers.String},
		"curves":      {"6 steps"},
	} {
		for _, w := range want {
			if !strings.Contains(p.text[section], w) {
				t.Errorf("section %q does not say %q:\n%s", section, w, p.text[section])
			}
		}
	}
	if strings.Contains(fmt.Sprint(p.text), "hunter2") {
		t.Error("a secret is shown")
	}
}

func last(lines []metricsLine) (l metricsLine) {
	for _, x := range lines {
		if x.Loss != 0 {
			l = x
		}
	}
	return l
}

// The report of a resumed run includes the steps before it. One rank sends nothing.
func TestReportOfOtherRuns(t *testing.T) {
	dir, run := newKept(t, "eval.split=0.2", "output.overwrite=true")
	report := filepath.Join(dir, "out", "report.html")
	if _, err := run(1, "checkpoint.every=0", "checkpoint.resume=off"); err != nil {
		t.Fatal(err)
	}
	p := readReport(t, report)
	if !strings.Contains(p.text[""], "one rank sends nothing") || len(p.charts) != 5 {
		t.Errorf("one rank: %d charts, %s", len(p.charts), p.text[""])
	}
	if _, err := run(2, "train.steps=1", "checkpoint.resume=off", "checkpoint.every=1"); err != nil {
		t.Fatal(err)
	}
	if p = readReport(t, report); len(p.charts) != 5 || len(p.charts[0].Series[0].X) != 1 {
		t.Errorf("one step: %+v", p.charts)
	}
	if _, err := run(2, "train.steps=3", "checkpoint.accept=train.steps"); err != nil {
		t.Fatal(err)
	}
	if p = readReport(t, report); !strings.Contains(p.text[""], "resumed after step 1") ||
		!slices.Equal(p.charts[0].Series[0].X, []float64{1, 2, 3}) {
		t.Errorf("resumed: %s", p.text[""])
	}
}

// An evaluation in the output.dir of a training run leaves the run's results unchanged:
// metrics.jsonl has one line for the last of several evaluations, and the report is a separate
// file. The run can be resumed; a run that starts again starts a new metrics.jsonl.
func TestEvaluationBesideARun(t *testing.T) {
	dir, run := newKept(t, "eval.split=0.2", "output.model=false")
	metrics, report := filepath.Join(dir, "out", "metrics.jsonl"), filepath.Join(dir, "out", "report.html")
	if _, err := run(2, "train.steps=2"); err != nil {
		t.Fatal(err)
	}
	steps, page := text(t, metrics), text(t, report)
	// cut short by a kill
	if err := os.WriteFile(metrics, []byte(steps+`{"step":3,"lo`), 0o666); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if out, err := run(2, "kind=eval"); err != nil || !strings.Contains(out, "report-eval.html") {
			t.Fatal(err, out)
		}
		line, ok := strings.CutPrefix(text(t, metrics), steps)
		if !ok || strings.Count(line, "\n") != 1 || !strings.HasPrefix(line, `{"step":0,"eval_loss":`) {
			t.Errorf("metrics.jsonl: %s", text(t, metrics))
		}
	}
	if text(t, report) != page {
		t.Error("the run's report has changed")
	}
	p := readReport(t, filepath.Join(dir, "out", "report-eval.html"))
	if len(p.charts) != 0 || !strings.Contains(p.text["curves"], "An evaluation has no curves") ||
		p.row("curves", "0")[1] == "" || len(p.tables["curves"]) != 2 {
		t.Errorf("an evaluation: %+v %v", p.charts, p.tables["curves"])
	}
	if _, err := run(2, "train.steps=4", "checkpoint.accept=train.steps"); err != nil {
		t.Fatal(err)
	}
	p = readReport(t, report)
	if s := p.charts[0].Series; !slices.Equal(s[0].X, []float64{1, 2, 3, 4}) ||
		!slices.Equal(s[1].X, []float64{2, 4}) || p.row("curves", "0")[0] != "" {
		t.Errorf("gone on: %+v", s)
	}
	if !strings.HasPrefix(text(t, metrics), steps+`{"step":0,"eval_loss":`) {
		t.Errorf("gone on: metrics.jsonl: %s", text(t, metrics))
	}
	if _, err := run(2, "train.steps=1", "checkpoint.resume=off", "output.overwrite=true"); err != nil {
		t.Fatal(err)
	}
	if s := text(t, metrics); strings.Contains(s, `"step":0`) || !strings.HasPrefix(s, `{"step":1,`) {
		t.Errorf("anew: metrics.jsonl: %s", s)
	}
}

// An evaluation with the job file of a training run evaluates a model that was never trained, and a
// warning says so.
func TestEvaluationOfANewModel(t *testing.T) {
	dir, _ := newKept(t)
	for kind, want := range map[string]bool{"eval": true, "train": false} {
		var stderr bytes.Buffer
		if err := Run(Options{Path: filepath.Join(dir, "job.toml"),
			Sets: []string{"kind=" + kind, "train.steps=1", "output.overwrite=true"}, Ranks: 2, Stdout: io.Discard,
			Stderr: &stderr}); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(stderr.String(), "the weights are random, drawn from seed") != want {
			t.Errorf("%s: %s", kind, stderr.String())
		}
	}
}

// Without a target the loss is 0, also of a training step, and a warning says that it has no
// meaning.
func TestEvaluationOfNothing(t *testing.T) {
	dir, _ := newKept(t)
	for _, kind := range []string{"eval", "train"} {
		var stdout, stderr bytes.Buffer
		if err := Run(Options{Path: filepath.Join(dir, "job.toml"),
			Sets: []string{"kind=" + kind, "data.sequence=1", "eval.split=0.5", "train.steps=2",
				"output.dir=" + filepath.Join(dir, kind)},
			Ranks: 2, Verbose: true, Stdout: &stdout, Stderr: &stderr}); err != nil {
			t.Fatal(kind, err)
		}
		if s := text(t, filepath.Join(dir, kind, "metrics.jsonl")); !strings.Contains(s,
			`"eval_loss":0,"eval_tokens":0`) {
			t.Errorf("%s: metrics.jsonl: %s", kind, s)
		}
		if n := strings.Count(stderr.String(), "no token of the step is a target"); (n == 1) != (kind == "train") {
			t.Errorf("%s: %d warnings of steps without targets: %s", kind, n, stderr.String())
		}
		if !strings.Contains(stderr.String(), "no token of the evaluation") ||
			strings.Contains(stdout.String()+stderr.String(), "perplexity") {
			t.Errorf("%s: %s%s", kind, stdout.String(), stderr.String())
		}
	}
}

func text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// A run that fails on all ranks writes the report of the steps that were done, with the error.
func TestReportOfAFailedRun(t *testing.T) {
	for _, x := range []struct {
		name  string
		sets  []string
		state string
		steps int // in the report
		says  string
	}{
		{"later", []string{"optimizer.lr=1e18", "optimizer.warmup=0", "optimizer.clip=0.0", "output.trace=[1, 6]"},
			"failed after step 1 of 6", 1, "train: step 2: loss "},
		{"at once", []string{"model.new.initializer_range=1e38", "output.trace=[1, 6]"}, "failed after step 0 of 6", 0,
			"train: step 1: loss "},
		{"evaluation", []string{"kind=eval", "eval.split=0.2", "model.new.initializer_range=1e38"}, "failed", 0,
			"train: evaluation after step 0: loss "},
	} {
		dir, run := newKept(t, append(x.sets, "checkpoint.every=0")...)
		out, err := run(3)
		if status.Of(err) != status.Numeric || !strings.Contains(err.Error(), x.says) ||
			strings.Contains(out, "model            ") || strings.Contains(out, "NOT EQUAL") {
			t.Fatalf("%s: %v\n%s", x.name, err, out)
		}
		report := filepath.Join(dir, "out", "report.html")
		p := readReport(t, report)
		if text := p.text[""]; !strings.Contains(text, x.state) || !strings.Contains(text, x.says) ||
			strings.Contains(text, "finished") {
			t.Errorf("%s: %s", x.name, text)
		}
		if x.steps > 0 && (len(p.charts) == 0 || len(p.charts[0].Series[0].X) != x.steps) || x.steps == 0 &&
			!strings.Contains(p.text["curves"], "No step was completed.") {
			t.Errorf("%s: %+v %s", x.name, p.charts, p.text["curves"])
		}
		if x.name == "later" && !strings.Contains(out, "trace.json: steps 1 to 1, ") || x.name == "at once" &&
			!strings.Contains(out, "trace            none: ") {
			t.Errorf("%s: the trace: %s", x.name, out)
		}
		if !strings.Contains(out, report) {
			t.Errorf("%s: the table does not name the report: %s", x.name, out)
		}
	}
}
