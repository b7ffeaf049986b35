package job

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/internal/clock"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/job/plan"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

// The smoothed loss is drawn beside the loss of each step. It follows a change within its window,
// has no bias towards the first step, and skips gaps.
func TestSmoothedLoss(t *testing.T) {
	h := &history{Steps: 300}
	for i := range 300 {
		y := 5.0
		if i >= 150 {
			y = 3
		}
		y += 0.5 * float64(1-2*(i%2)) // noise
		switch i {
		case 10:
			y = math.NaN()
		case 20:
			y = math.Inf(1)
		}
		h.loss.X, h.loss.Y = append(h.loss.X, float64(i+1)), append(h.loss.Y, y)
	}
	s := h.charts()[0].Series
	if len(s) != 2 || s[0].Style != "faint" || s[1].Style != "line" || s[1].Name != "smoothed over 10 steps" {
		t.Fatalf("%+v", s)
	}
	for at, want := range map[int]float64{0: 5.5, 149: 5, 299: 3} {
		near.Value(t, fmt.Sprintf("smoothed loss of step %d", at+1), *s[1].Y[at], want, 0.06)
	}
	if s[1].Y[10] != nil || s[1].Y[20] != nil || s[1].Y[21] == nil {
		t.Error("gaps")
	}
	h.loss = points{h.loss.X[:19], h.loss.Y[:19]}
	if s := h.charts()[0].Series; len(s) != 1 || s[0].Style != "line" {
		t.Errorf("a short run: %+v", s)
	}
}

// All numbers of an axis have one unit, which the axis's label names: never 16.00k beside 8000.
func TestAxesHaveOneUnit(t *testing.T) {
	for _, x := range []struct {
		unit  string
		most  float64
		scale float64
		name  string
	}{
		{"tokens/s", 8000, 1, "tokens/s"}, {"tokens/s", 16000, 1e3, "k tokens/s"}, {"tokens/s", 3.2e6, 1e6, "M tokens/s"},
		{"FLOP/s", 0.0083, 1e-3, "GFLOP/s"}, {"FLOP/s", 0.027, 1e-3, "GFLOP/s"}, {"FLOP/s", 417, 1, "TFLOP/s"}, {"FLOP/s", 5e-7, 1e-9, "kFLOP/s"},
		{"nats a token", 6.2, 1, "nats a token"}, {"nats a token", 2e7, 1e7, "nats a token × 10⁷"}, {"", 5e-3, 1e-3, "× 10⁻³"}, {"", 3e-4, 1e-4, "× 10⁻⁴"}, {"", 0, 1, ""}, {"", 0.5, 1, ""},
	} {
		if scale, name := axisScale(x.most, x.unit); !(math.Abs(scale/x.scale-1) <= 1e-12) || name != x.name {
			t.Errorf("%v %s: %v %q", x.most, x.unit, scale, name)
		}
	}
	h := &history{}
	for i := range int64(30) {
		loss, norm, rate, speed, flops := 5.0, 1.0, 3e-4, 8000+300*float64(i), 0.4
		h.add(&historyLine{Step: i + 1, Loss: &loss, GradNorm: &norm, LR: &rate, TokensPerSecond: &speed, ModelTFLOPS: &flops})
	}
	var axes []string
	for _, c := range h.charts() {
		axes = append(axes, c.Axis)
	}
	if want := []string{"loss, nats a token", "norm before clipping", "learning rate, × 10⁻⁴", "all ranks, k tokens/s", "a rank, causal, GFLOP/s"}; !slices.Equal(axes, want) {
		t.Errorf("axes %q", axes)
	}
}

// Every phase that the program enters has one colour, which is the same in every report.
func TestPhasesHaveTheirOwnColours(t *testing.T) {
	entered := regexp.MustCompile(`\b(?:phase|Push)\("([a-z-]+)"\)|phase :?= "([a-z-]+)"`)
	found := 0
	for _, dir := range []string{"../comm", "../model", "../train"} {
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			for _, m := range entered.FindAllStringSubmatch(text(t, file), -1) {
				found++
				if name := m[1] + m[2]; !slices.Contains(phaseNames, name) {
					t.Errorf("%s: the phase %s has no colour", file, name)
				}
			}
		}
	}
	if found < len(phaseNames) {
		t.Errorf("%d phases found in the sources", found)
	}
	rows := []phaseRow{{Name: "somewhere"}, {Name: "data"}, {Name: "exchange"}}
	for _, x := range [][]phaseRow{rows, {rows[1], rows[2]}} {
		for _, p := range coloured(x) {
			if want := map[string]int{"data": slices.Index(phaseNames, "data"), "exchange": 0, "somewhere": len(phaseNames)}[p.Name]; p.Colour != want {
				t.Errorf("%s has colour %d, want %d", p.Name, p.Colour, want)
			}
		}
	}
	facts := []rankFacts{{Phases: []clock.Phase{{Name: "mlp", Calls: 1, Seconds: 1}, {Name: "data", Calls: 1, Seconds: 2}}}}
	phases := coloured(phaseRows(facts))
	all, _ := bars(facts, phases)
	for i, p := range all[0].Parts {
		if p.Name != phases[i].Name || p.Colour != phases[i].Colour {
			t.Errorf("bar %+v, table %+v", p, phases[i])
		}
	}
}

// The colours of phases can be told apart in the light and the dark style, also by readers with one
// type of cones missing. The test uses CIE76 distances in CIELAB after the simulation of Machado,
// Oliveira and Fernandes (2009) for protanopia and deuteranopia.
func TestColoursCanBeToldApart(t *testing.T) {
	style := regexp.MustCompile(`--c(\d+): #([0-9a-f]{6});`).FindAllStringSubmatch(pageStyle, -1)
	if len(style) != 2*phaseColours {
		t.Fatalf("%d colours in the style", len(style))
	}
	identity := [3][3]float64{{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}
	for name, eye := range map[string][3][3]float64{
		"all cones":    identity,
		"protanopia":   {{0.152286, 1.052583, -0.204868}, {0.114503, 0.786281, 0.099216}, {-0.003882, -0.048116, 1.051998}},
		"deuteranopia": {{0.367322, 0.860646, -0.227968}, {0.280085, 0.672501, 0.047413}, {-0.011820, 0.042940, 0.968881}},
	} {
		for theme := range 2 {
			var seen [][3]float64
			for i, c := range style[theme*phaseColours:][:phaseColours] {
				if c[1] != strconv.Itoa(i) {
					t.Fatalf("colour %d is --c%s", i, c[1])
				}
				lab := cielab(t, c[2], eye)
				for j, other := range seen {
					if d := math.Sqrt(sq(lab[0]-other[0]) + sq(lab[1]-other[1]) + sq(lab[2]-other[2])); d < 14 {
						t.Errorf("%s, theme %d: colours %d and %d are %.1f apart", name, theme, j, i, d)
					}
				}
				seen = append(seen, lab)
			}
		}
	}
}

func sq(x float64) float64 { return x * x }

func cielab(t *testing.T, hex string, eye [3][3]float64) (lab [3]float64) {
	n, err := strconv.ParseUint(hex, 16, 32)
	if err != nil {
		t.Fatal(err)
	}
	times := func(m [3][3]float64, v [3]float64) (out [3]float64) {
		for i := range 3 {
			out[i] = m[i][0]*v[0] + m[i][1]*v[1] + m[i][2]*v[2]
		}
		return out
	}
	var c [3]float64
	for i := range 3 {
		x := float64(n>>(16-8*i)&255) / 255
		if c[i] = x / 12.92; x > 0.04045 {
			c[i] = math.Pow((x+0.055)/1.055, 2.4)
		}
	}
	c = times(eye, c)
	for i := range c {
		c[i] = min(max(c[i], 0), 1)
	}
	c = times([3][3]float64{{0.4124564, 0.3575761, 0.1804375}, {0.2126729, 0.7151522, 0.0721750}, {0.0193339, 0.1191920, 0.9503041}}, c)
	for i, white := range []float64{0.95047, 1, 1.08883} {
		x := c[i] / white
		if c[i] = (24389.0/27*x + 16) / 116; x > 216.0/24389 {
			c[i] = math.Cbrt(x)
		}
	}
	return [3]float64{116*c[1] - 16, 500 * (c[0] - c[1]), 200 * (c[1] - c[2])}
}

// The resolved job of the report is a job file that reads as the same job. It has the values of
// --set and of the program, and comes before the job file's text.
func TestResolvedJob(t *testing.T) {
	dir, run := newKept(t, "checkpoint.every=0", `model.new.rope_parameters={rope_theta=5e4, rope_type="default"}`, "optimizer.lr=2e-3", "train.epochs=2", "train.steps=0")
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
	for _, want := range []string{"lr = 0.002  # by --set", "ulysses = 4  # chosen by the program: --set says 0", "accumulate = 4  # chosen by the program", "warmup = 2\n", "[model.new]"} {
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
	if j.Optimizer.LR != 2e-3 || j.Parallel.Ulysses != 4 || j.Train.Steps < 2 || j.Data.Sequence != 48 || j.Seed != 5 || !reflect.DeepEqual(j.Model.New["rope_parameters"],
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
	for _, m := range regexp.MustCompile(`"tokens":(\d+)`).FindAllStringSubmatch(text(t, filepath.Join(dir, "out", "metrics.jsonl")), -1) {
		n, _ := strconv.ParseInt(m[1], 10, 64)
		tokens += n
	}
	for _, want := range []string{"<span>tokens</span><b>" + units.Grouped(tokens) + "</b>", "<span>elapsed</span>", "<span>commit</span>", "<span>tokens/s</span>", "<span>model FLOP/s</span>"} {
		if !strings.Contains(cards, want) {
			t.Errorf("no %q in %s", want, cards)
		}
	}
	if footer := page[strings.Index(page, "<footer>"):]; strings.Contains(cards, "traffic") || !strings.Contains(footer, "traffic: equal") {
		t.Errorf("traffic: %s", footer)
	}
	cpu := &plan.Machine{Info: device.Info{Place: tensor.Host}, Peak: 40e9}
	if share, of := cpu.ShareOfPeak(10e9); share != 0.25 || of != "of 40 GFLOP/s a rank: matrix products, as measured after the run" {
		t.Errorf("%v %q", share, of)
	}
	gpu := &plan.Machine{Info: device.Info{Place: tensor.CUDA, Name: "NVIDIA H200"}, Rates: dryrun.Rates{Products: 700e12}}
	if share, of := gpu.ShareOfPeak(350e12); share != 0.5 || of != "of 700 TFLOP/s a rank: matrix products, published for NVIDIA H200" {
		t.Errorf("%v %q", share, of)
	}
	for _, none := range []*plan.Machine{{}, {Info: device.Info{Place: tensor.CUDA, Name: "GPU"}}} {
		if share, of := none.ShareOfPeak(1e9); share != 0 || of != "" {
			t.Errorf("%v %q", share, of)
		}
	}
	bad := &session{Env: &Env{Mesh: &comm.Mesh{World: comm.NewCounted(comm.Local(2)[0], "world", nil, nil, nil)}}}
	if v := bad.trafficVerdict([]trafficRow{{Axis: "world", Op: comm.OpAllReduce}}); v.Value != "NOT EQUAL" || !strings.Contains(fmt.Sprint(v), "all-reduce on axis world") {
		t.Errorf("%v", v)
	}
}
