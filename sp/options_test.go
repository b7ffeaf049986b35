package sp

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/testkit/fake"
	"ulysses/testkit/mpitest"
)

// optionCases are settings of the options, by name, with the awkward ones. Options that do not
// change the result have none.
var optionCases = map[string][]func(l *Layer){
	"causal, aligned with the last key of a document": {func(l *Layer) { l.Causal = true }},
	"window": {
		func(l *Layer) { l.Window = &device.Window{Left: 9, Right: -1} },
		func(l *Layer) { l.Window = &device.Window{Left: 0, Right: 0} },
		func(l *Layer) { l.Window = &device.Window{Left: 21, Right: 5} },
		func(l *Layer) { l.Window = &device.Window{Left: -1, Right: 3} },
	},
	"factor of scores":              {func(l *Layer) { l.Scale = 0.4 }},
	"soft cap":                      {func(l *Layer) { l.Softcap = 1.5 }},
	"slopes (ALiBi), with gradient": {func(l *Layer) { l.ALiBi = true }},
	"sinks, with gradient":          {func(l *Layer) { l.Sinks = true }},
	"block mask": {
		func(l *Layer) { l.BlockRows, l.BlockColumns = 8, 16 }, func(l *Layer) { l.BlockRows, l.BlockColumns = 16, 8 },
		func(l *Layer) { l.BlockRows, l.BlockColumns = 1, 1 }, func(l *Layer) { l.BlockRows, l.BlockColumns = 5, 7 },
	},
	"dropout":                            {func(l *Layer) { l.Dropout = 0.25 }},
	"ring":                               nil, // the meshes have them
	"all-gather of a ring's keys":        nil,
	"no backward pass":                   nil,
	"bitwise reproducible backward pass": nil,
}

// paths are the ways of dividing attention among ranks: the groups of the ring, and its form.
var paths = []struct {
	name   string
	ring   func(ranks int64) int64
	gather bool
}{
	{"ulysses", func(int64) int64 { return 1 }, false},
	{"ring", func(ranks int64) int64 { return ranks }, false},
	{"all-gather", func(ranks int64) int64 { return ranks }, true},
	{"ulysses and ring", func(ranks int64) int64 {
		if ranks%2 == 0 {
			return ranks / 2
		}
		return ranks
	}, false},
}

// A device without kernels for an option refuses the layer on every path, with the same error on
// all ranks, and only the agreement is sent.
func TestOptionsWithoutKernelsAreRefused(t *testing.T) {
	for _, o := range Options {
		if (o.ask != nil) != (asked[o.Name] != nil) {
			t.Errorf("%s: the list and the test's device do not agree", o.Name)
		}
		if o.ask == nil {
			continue
		}
		for _, path := range paths {
			for _, n := range mpitest.Sizes() {
				l := Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8, Ring: path.ring(int64(n)), Gather: path.gather}
				if o.Name == "ring" && l.Ring == 1 {
					continue
				}
				for _, set := range optionCases[o.Name] {
					set(&l)
				}
				mpitest.Ranks(t, n, func(c comm.Comm) error { return lacks(c, l, o.Name) })
			}
		}
	}
}

func lacks(c comm.Comm, l Layer, option string) error {
	d, err := fake.Open(fake.Options{})
	must(err)
	defer d.Close()
	count := &counted{Comm: c}
	_, err = NewPlan(&lacking{d, option}, count, l)
	if status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), option) {
		return fmt.Errorf("%+v: %v, want a refusal of %s", l, err, option)
	}
	if count.calls != 0 {
		return fmt.Errorf("%d all-to-alls before the refusal", count.calls)
	}
	return comm.Same(c, "refusal", comm.Field{Name: "error", Value: err.Error()})
}

// Settings that are impossible are refused, with the same error on all ranks.
func TestImpossibleOptionsAreRefused(t *testing.T) {
	nan := func() float64 { var zero float64; return zero / zero }()
	impossible := map[string][]Layer{
		"factor of scores": {{Scale: nan}},
		"soft cap":         {{Softcap: -1}, {Softcap: nan}, {Softcap: 1e-31}, {Softcap: 1e31}},
		"block mask":       {{BlockRows: 8}, {BlockColumns: 8}, {BlockRows: -1, BlockColumns: 8}},
		"dropout":          {{Dropout: 1}, {Dropout: -0.1}, {Dropout: nan}},
	}
	for _, o := range Options {
		if (o.check != nil) != (impossible[o.Name] != nil) {
			t.Errorf("%s: checks and the test's settings do not agree", o.Name)
		}
		for _, l := range impossible[o.Name] {
			l.Heads, l.KVHeads, l.Dim, l.VDim = 4, 2, 8, 8
			for _, n := range mpitest.Sizes() {
				mpitest.Ranks(t, n, func(c comm.Comm) error {
					b := newBench()
					defer b.close()
					count := &counted{Comm: c}
					_, err := NewPlan(b.dev, count, l)
					if status.Of(err) != status.InvalidArgument || count.calls != 0 {
						return fmt.Errorf("%s: %+v: %v after %d all-to-alls", o.Name, l, err, count.calls)
					}
					return comm.Same(c, "refusal", comm.Field{Name: "error", Value: err.Error()})
				})
			}
		}
	}
}

// Ranks that do not agree on an option get the same error, which names it.
func TestOptionsAreEqualOnAllRanks(t *testing.T) {
	for _, o := range Options {
		for _, set := range optionCases[o.Name] {
			for _, n := range mpitest.Sizes()[1:] {
				mpitest.Ranks(t, n, func(c comm.Comm) error {
					b := newBench()
					defer b.close()
					l := Layer{Heads: 4, KVHeads: 2, Dim: 8, VDim: 8}
					if c.Rank() == n-1 {
						set(&l)
					}
					_, err := NewPlan(b.dev, c, l)
					set(&l)
					if err == nil || !strings.Contains(err.Error(), o.fields(&l)[0].Name) {
						return fmt.Errorf("%s on one rank: %v", o.Name, err)
					}
					return comm.Same(c, "refusal", comm.Field{Name: "error", Value: err.Error()})
				})
			}
		}
	}
}

// Each option has cases, and a row in docs/attention.md with the names that the other interfaces
// have for it.
func TestOptionsAreDocumented(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	page, header := read("../docs/attention.md"), read("../capi/ulysses.h")
	var python strings.Builder
	for _, name := range []string{"attention", "context", "plan", "_torch", "layer"} {
		python.WriteString(read("../python/ulysses/" + name + ".py"))
	}
	keys := read("../docs/job-file.md") + read("../docs/attention.md")
	for _, o := range Options {
		if _, ok := optionCases[o.Name]; !ok {
			t.Errorf("%s has no cases", o.Name)
		}
		if o.Job == "" || o.C == "" || o.Python == "" {
			t.Errorf("%s: a job, C and Python share all options, and one has no name for it", o.Name)
		}
		row := fmt.Sprintf("| %s | %s | %s | %s |", o.Name, o.Job, o.C, o.Python)
		if !strings.Contains(page, row) {
			t.Errorf("docs/attention.md has no row\n%s", row)
		}
		for _, x := range []struct {
			names, where, text string
		}{{o.C, "capi/ulysses.h", header}, {o.Python, "python/ulysses", python.String()}, {o.Job, "docs", keys}} {
			for _, quoted := range quotedName.FindAllStringSubmatch(x.names, -1) {
				if !strings.Contains(x.text, quoted[1]) {
					t.Errorf("%s: %s does not have %q", o.Name, x.where, quoted[1])
				}
			}
		}
	}
}

// quotedName is a name in backquotes, without the table or the call that it belongs to.
var quotedName = regexp.MustCompile("`(?:[a-z]+\\.|Context\\()?([A-Za-z_]+)=?\\)?`")

// lacking is a device whose kernels lack an option.
type lacking struct {
	device.Device
	option string
}

// asked reports by option whether a call asks for it.
var asked = map[string]func(a *device.Attention) bool{
	"soft cap":                      func(a *device.Attention) bool { return a.Softcap != 0 },
	"slopes (ALiBi), with gradient": func(a *device.Attention) bool { return !a.Slopes.IsNil() },
	"sinks, with gradient":          func(a *device.Attention) bool { return !a.Sinks.IsNil() },
	"block mask":                    func(a *device.Attention) bool { return !a.BlockMask.IsNil() },
	"dropout":                       func(a *device.Attention) bool { return a.Dropout != 0 },
	"ring":                          func(a *device.Attention) bool { return a.Carry },
}

func (d *lacking) AttentionKernel(a *device.Attention, backward bool) (string, error) {
	if asked[d.option](a) {
		return "", status.Errorf(status.Unsupported, "%s is not built", d.option)
	}
	return "kernel", nil
}
