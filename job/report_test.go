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

	"golang.org/x/net/html"

	"ulysses/comm"
	"ulysses/internal/status"
	vers "ulysses/internal/version"
	"ulysses/train"
)

// reportPage is report.html as a browser sees it.
type reportPage struct {
	charts  []chart
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
			case (a.Key == "src" || a.Key == "href" || a.Key == "data" || a.Key == "action") && !strings.HasPrefix(a.Val, "#"):
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
				if err := json.Unmarshal([]byte(strings.TrimSuffix(strings.TrimPrefix(code, "const charts = "), ";")), &p.charts); err != nil {
					t.Errorf("charts: %v in %s", err, code)
				}
			}
			return
		case n.Type == html.ElementNode && n.Data == "style" && (strings.Contains(n.FirstChild.Data, "@import") || strings.Contains(n.FirstChild.Data, "url(")):
			t.Error("the style fetches something")
		case n.Type == html.ElementNode && (n.Data == "img" || n.Data == "iframe" || n.Data == "link" || n.Data == "object"):
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

// row is the line of a section's table that begins so.
func (p *reportPage) row(section string, cells ...string) []string {
	for _, r := range p.tables[section] {
		if len(r) >= len(cells) && slices.Equal(r[:len(cells)], cells) {
			return r
		}
	}
	return make([]string, 9)
}

// A run's report has the numbers of metrics.jsonl, of the ledger and of the plan; nothing in it is
// fetched, and nothing that comes from outside is taken for its own.
func TestReport(t *testing.T) {
	t.Setenv("SLURM_JWT", "hunter2")
	t.Setenv("SLURM_JOB_NAME", "<b>bold</b>")
	dir, run := newKept(t, "checkpoint.every=0", "eval.split=0.2", "eval.every=2")
	odd := `x<img src=x onerror=alert(1)><script>.txt`
	put(t, filepath.Join(dir, odd), strings.Repeat("the cat sat on the mat. ", 90))
	out, err := run(4, "parallel.ulysses=2", "parallel.zero=3", `data.path=[`+fmt.Sprintf("%q", filepath.Join(dir, odd))+`]`)
	if err != nil || !strings.Contains(out, filepath.Join("out", "report.html")) {
		t.Fatal(err, out)
	}
	p := readReport(t, filepath.Join(dir, "out", "report.html"))
	lines := readMetrics(t, filepath.Join(dir, "out", "metrics.jsonl"))
	var names []string
	for _, c := range p.charts {
		names = append(names, c.Title)
		if c.Title == "Loss" && (len(c.Series) != 2 || len(c.Series[0].X) != 6 || *c.Series[0].Y[5] != last(lines).Loss || !slices.Equal(c.Series[1].X, []float64{2, 4, 6})) {
			t.Errorf("losses %+v", c.Series)
		}
	}
	if !slices.Equal(names, []string{"Loss", "Gradient norm", "Learning rate", "Speed", "Model FLOP/s"}) {
		t.Errorf("charts %v", names)
	}
	for _, op := range [][2]string{{"sequence", comm.OpAllToAll}, {"world", comm.OpAllGather}, {"world", comm.OpReduceScatter}} {
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
		"time":        {"rank 3", "attention", "exchange"},
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

// A run that goes on shows the steps before it; one rank sends nothing.
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
	if p = readReport(t, report); !strings.Contains(p.text[""], "resumed after step 1") || !slices.Equal(p.charts[0].Series[0].X, []float64{1, 2, 3}) {
		t.Errorf("resumed: %s", p.text[""])
	}
}

// An evaluation whose output.dir is a training run's takes nothing from it: metrics.jsonl gets one
// line, of however many evaluations, and the report is a file of its own. The run goes on as if
// nothing had been; one that starts anew starts metrics.jsonl anew.
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
	if len(p.charts) != 0 || !strings.Contains(p.text["curves"], "an evaluation has no curves") || p.row("curves", "0")[1] == "" || len(p.tables["curves"]) != 2 {
		t.Errorf("an evaluation: %+v %v", p.charts, p.tables["curves"])
	}
	if _, err := run(2, "train.steps=4", "checkpoint.accept=train.steps"); err != nil {
		t.Fatal(err)
	}
	p = readReport(t, report)
	if s := p.charts[0].Series; !slices.Equal(s[0].X, []float64{1, 2, 3, 4}) || !slices.Equal(s[1].X, []float64{2, 4}) || p.row("curves", "0")[0] != "" {
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

// A training run's own job file, evaluated, is a model that was never trained: that is said.
func TestEvaluationOfANewModel(t *testing.T) {
	dir, _ := newKept(t)
	for kind, want := range map[string]bool{"eval": true, "train": false} {
		var stderr bytes.Buffer
		if err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: []string{"kind=" + kind, "train.steps=1", "output.overwrite=true"}, Ranks: 2, Stdout: io.Discard, Stderr: &stderr}); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(stderr.String(), "not trained, but drawn from seed") != want {
			t.Errorf("%s: %s", kind, stderr.String())
		}
	}
}

// Without a valid target the loss is 0, as a training step's is, and a warning says that it says
// nothing.
func TestEvaluationOfNothing(t *testing.T) {
	dir, _ := newKept(t)
	for _, kind := range []string{"eval", "train"} {
		var stdout, stderr bytes.Buffer
		if err := Run(Options{Path: filepath.Join(dir, "job.toml"), Sets: []string{"kind=" + kind, "data.sequence=1", "eval.split=0.5", "train.steps=1", "output.dir=" + filepath.Join(dir, kind)},
			Ranks: 2, Verbose: true, Stdout: &stdout, Stderr: &stderr}); err != nil {
			t.Fatal(kind, err)
		}
		if s := text(t, filepath.Join(dir, kind, "metrics.jsonl")); !strings.Contains(s, `"eval_loss":0,"eval_tokens":0`) {
			t.Errorf("%s: metrics.jsonl: %s", kind, s)
		}
		if !strings.Contains(stderr.String(), "not one token") || strings.Contains(stdout.String()+stderr.String(), "perplexity") {
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

// A run that all ranks give up together leaves the report of the steps that were done, which says
// why it ended.
func TestReportOfAFailedRun(t *testing.T) {
	for _, x := range []struct {
		name  string
		sets  []string
		state string
		steps int // in the report
		says  string
	}{
		{"later", []string{"optimizer.lr=1e18", "optimizer.warmup=0", "optimizer.clip=0.0", "output.trace=[1, 6]"}, "failed after step 1 of 6", 1, "train: step 2: loss "},
		{"at once", []string{"model.new.initializer_range=1e38", "output.trace=[1, 6]"}, "failed after step 0 of 6", 0, "train: step 1: loss "},
		{"evaluation", []string{"kind=eval", "eval.split=0.2", "model.new.initializer_range=1e38"}, "failed", 0, "train: evaluation after step 0: loss "},
	} {
		dir, run := newKept(t, append(x.sets, "checkpoint.every=0")...)
		out, err := run(3)
		if status.Of(err) != status.Numeric || !strings.Contains(err.Error(), x.says) || strings.Contains(out, "model            ") || strings.Contains(out, "NOT EQUAL") {
			t.Fatalf("%s: %v\n%s", x.name, err, out)
		}
		report := filepath.Join(dir, "out", "report.html")
		p := readReport(t, report)
		if text := p.text[""]; !strings.Contains(text, x.state) || !strings.Contains(text, x.says) || strings.Contains(text, "finished") {
			t.Errorf("%s: %s", x.name, text)
		}
		if x.steps > 0 && (len(p.charts) == 0 || len(p.charts[0].Series[0].X) != x.steps) || x.steps == 0 && !strings.Contains(p.text["curves"], "No step was done.") {
			t.Errorf("%s: %+v %s", x.name, p.charts, p.text["curves"])
		}
		if x.name == "later" && !strings.Contains(out, "trace.json: steps 1 to 1, ") || x.name == "at once" && !strings.Contains(out, "trace            none: ") {
			t.Errorf("%s: the trace: %s", x.name, out)
		}
		if !strings.Contains(out, report) {
			t.Errorf("%s: the table does not name the report: %s", x.name, out)
		}
	}
}

// Numbers that are none become gaps; a long run is thinned without losing a peak; half a line is
// left out.
func TestHistory(t *testing.T) {
	var b strings.Builder
	const n = 50000
	for i := range n {
		loss := fmt.Sprint(2 + math.Sin(float64(i)/100))
		switch i {
		case 12345:
			loss = "99.5"
		case 23456:
			loss = "-7"
		case 34567:
			loss = "null"
		}
		fmt.Fprintf(&b, `{"step":%d,"loss":%s,"grad_norm":1,"lr":0.1,"tokens_per_second":5,"model_tflops":1}`+"\n", i+1, loss)
	}
	b.WriteString(`{"step":50000,"eval_loss":null,"eval_tokens":7}` + "\n" + `{"step":50001,"lo`)
	path := filepath.Join(t.TempDir(), "metrics.jsonl")
	put(t, path, b.String())
	h, err := readHistory(path, false)
	if err != nil || h.Steps != n || h.NoNumber != 1 || len(h.Evals) != 1 || !math.IsNaN(h.Evals[0].Loss) {
		t.Fatalf("%v %d steps, %d without a number, %v", err, h.Steps, h.NoNumber, h.Evals)
	}
	c := h.charts()[0]
	s := c.Series[0]
	if len(s.X) > mostPoints+4 || !slices.IsSorted(s.X) || s.X[0] != 1 || s.X[len(s.X)-1] != n {
		t.Errorf("%d points from %v to %v", len(s.X), s.X[0], s.X[len(s.X)-1])
	}
	low, high, gaps := math.Inf(1), math.Inf(-1), 0
	for i, y := range s.Y {
		if y == nil {
			if gaps++; s.X[i] != 34568 {
				t.Errorf("a gap at %v", s.X[i])
			}
			continue
		}
		low, high = min(low, *y), max(high, *y)
	}
	if low != -7 || high != 99.5 || gaps != 1 || len(c.Series) != 3 || c.Series[2].Name != "held out" {
		t.Errorf("lowest %v, highest %v, %d gaps", low, high, gaps)
	}
	if _, err := json.Marshal(h.charts()); err != nil {
		t.Error(err)
	}
	if !h.charts()[1].Log || positive([]float64{1, 0}) || positive([]float64{math.NaN()}) {
		t.Error("logarithmic axes")
	}
}

// Two ranks that are wrong by as much in opposite directions are wrong.
func TestTrafficIsHeldRankByRank(t *testing.T) {
	facts := make([]rankFacts, 2)
	for r := range facts {
		facts[r].Sent = []comm.Entry{{Axis: "world", Op: comm.OpAllReduce, Calls: 1, Bytes: int64(10 + 2*r)}, {Axis: "world", Op: comm.OpAllReduce, Control: true, Calls: 3, Bytes: 5},
			{Axis: "data", Op: comm.OpBroadcast, Calls: 1, Bytes: 4}}
		facts[r].Formula = []train.Traffic{{Axis: "world", Op: comm.OpAllReduce, What: "gradients", Bytes: 11}, {Axis: "sequence", Op: comm.OpAllToAll}}
	}
	rows := trafficRows(facts)
	want := []trafficRow{
		{Axis: "world", Op: comm.OpAllReduce, What: "gradients", Calls: 1, Sent: 22, Formula: 22, Least: 10, Most: 12},
		{Axis: "data", Op: comm.OpBroadcast, Calls: 1, Sent: 8, Least: 4, Most: 4},
		{Axis: "all", Op: "control", What: rows[len(rows)-1].What, Calls: 3, Sent: 10, Control: true},
	}
	if !slices.Equal(rows, want) {
		t.Errorf("%+v", rows)
	}
}
