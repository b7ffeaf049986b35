package model

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/testkit/near"
	"ulysses/testkit/ref"
)

// ulp is the distance of two adjacent float32 numbers, relative to them.
const ulp = 1.0 / (1 << 23)

// Frequencies and attention factors equal the results of transformers, at every length at which
// they switch, also after config.json was written and read again.
func TestRopeGoldens(t *testing.T) {
	text, err := os.ReadFile("../testdata/goldens/rope.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Config      json.RawMessage
		Length      int64
		Frequencies []float64
		Scale       float64
		Window      []float64 // frequencies of layers with a window, if they have their own
	}
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) < 30 {
		t.Fatal(len(cases), err)
	}
	for i, c := range cases {
		config := parse(t, string(c.Config))
		again, err := json.Marshal(config.fields())
		if err != nil {
			t.Fatal(err)
		}
		for _, config := range []*Config{config, parse(t, string(again))} {
			got := config.Rope.Frequencies(config.RotaryDim, c.Length)
			if len(got) != len(c.Frequencies) {
				t.Fatalf("%s: %d frequencies, want %d", c.Config, len(got), len(c.Frequencies))
			}
			for k, want := range c.Frequencies {
				near.Value(t, fmt.Sprintf("case %d, length %d, pair %d", i, c.Length, k), got[k], want, 1.01*ulp*want)
			}
			for k, want := range c.Window {
				near.Value(t, fmt.Sprintf("case %d, windows, pair %d", i, k),
					config.LocalRope.Frequencies(config.RotaryDim, c.Length)[k], want, 1.01*ulp*want)
			}
			scale := config.Rope.Scale
			if scale == 0 {
				scale = 1
			}
			near.Value(t, fmt.Sprintf("case %d, attention factor", i), scale, c.Scale, 1e-14)
		}
	}
}

// The frequencies of published models, from the description of the methods.
func TestRopeValues(t *testing.T) {
	const base = `{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, `
	for _, c := range []struct {
		fields string
		length int64
		first  int
		want   []float64
		scale  float64
	}{
		{`"rope_scaling": {"type": "linear", "factor": 4}`, 0, 0,
			[]float64{.25, .07905694, .025, .007905695, .0025, .0007905695, .00025, 7.905695e-5}, 0},
		{`"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4}`, 4096, 0,
			[]float64{1, .2512738, .06313851, .01586505, .00398647, .001001695, .0002516998, 6.324555e-5}, 0},
		{`"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4}`, 8192, 1,
			[]float64{.2192125, .0480541, .01053406, .002309197, .0005062047, .0001109664, 2.432521e-5}, 0},
		{`"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}`, 0, 0,
			[]float64{1, .3162278, .1, .02569351, .00625, .001383497, .00025, 7.905695e-5}, 1.138629436},
		{`"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 2048, "truncate": false}`,
			0, 3,
			[]float64{.0238702, .005056972, .0008112905}, 1.138629436},
		{`"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1}`,
			0, 0, []float64{1}, .9210423553},
		{`"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}`,
			0, 0,
			[]float64{1, .1939228, .03760603, .007292665, .000524846, 3.428102e-5, 6.64787e-6, 1.289173e-6}, 0},
		{`"head_dim": 64, "rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "truncate": false}`,
			0, 8, []float64{.05081327, .0317057}, 1.34657359},
	} {
		config := parse(t, base+c.fields+"}")
		got := config.Rope.Frequencies(config.RotaryDim, c.length)
		for k, want := range c.want {
			// want has seven digits
			near.Value(t, fmt.Sprintf("%s: pair %d", c.fields, c.first+k), got[c.first+k], want, 5e-7*want)
		}
		near.Value(t, c.fields+": attention factor", config.Rope.Scale, c.scale, 1e-9)
	}
}

// A factor below 1 takes no positions away, and an extension of fewer positions than the model has
// neither.
func TestPositions(t *testing.T) {
	const base = `{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 4096, "rope_scaling": `
	for scaling, want := range map[string]int64{
		`null`:                                    4096,
		`{"type": "linear", "factor": 4}`:         16384,
		`{"type": "linear", "factor": 0.5}`:       4096,
		`{"type": "dynamic", "factor": 2}`:        8192,
		`{"type": "yarn", "factor": 4}`:           16384,
		`{"type": "linear", "factor": 1e300}`:     1 << 53,
		`{"type": "proportional", "factor": 2}`:   8192,
		`{"type": "proportional", "factor": 0.5}`: 4096,
		`{"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}`:  4096,
		`{"type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}`: 8192,
	} {
		if got := parse(t, base+scaling+"}").Positions(); got != want {
			t.Errorf("%s: %d positions, want %d", scaling, got, want)
		}
	}
}

// A table of one kind of layer has its own truncate, or the one beside the tables. transformers
// reads the latter alone: it is written, and a table with another one gets a warning.
func TestTruncateOfAKindOfLayer(t *testing.T) {
	full := func(truncate string) string {
		return `{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 2048, "rope_theta": 1e4` +
			truncate + `}`
	}
	const no, yes = `, "truncate": false`, `, "truncate": true`
	rounded := []float64{.02569351, .00625, .001383497}
	exact := []float64{.0238702, .005056972, .0008112905}
	for _, source := range []string{olmo3, strings.Replace(olmo3, "olmo3", "gemma3_text", 1)} {
		for _, c := range []struct {
			table, beside string
			want          []float64 // frequencies 3 to 5 of 8
			warning       string
		}{
			{"", "", rounded, ""},
			{no, "", exact, "truncate = false has no effect in transformers"},
			{"", no, exact, ""},
			{no, no, exact, ""},
			{yes, no, rounded, "truncate = true has no effect in transformers"},
		} {
			name := fmt.Sprintf("%q, beside the tables %q", c.table, c.beside)
			config := parse(t, string(with(t, source, `"rope_parameters": {"full_attention": `+full(c.table)+
				`, "sliding_attention": {"rope_type": "default"}`+c.beside+`}`)))
			text, _ := config.JSON()
			again := parse(t, string(text))
			for _, config := range []*Config{config, again} {
				for k, f := range config.Rope.Frequencies(16, 0)[3:6] {
					near.Value(t, name, float64(f), c.want[k], 5e-7*c.want[k])
				}
			}
			w := strings.Join(config.Warnings(), " ")
			if !strings.Contains(w, c.warning) || (c.warning == "") != (w == "") {
				t.Errorf("%s: warnings %q, want %q", name, w, c.warning)
			}
			var saved map[string]map[string]any
			_ = json.Unmarshal(text, &saved) // other fields are no tables
			if beside := saved["rope_parameters"]["truncate"]; (beside == false) != (&c.want[0] == &exact[0]) {
				t.Errorf("%s: %v is beside the tables of %s", name, beside, text)
			}
			if w := again.Warnings(); len(w) > 0 {
				t.Errorf("%s: the saved file has warnings %q", name, w)
			}
		}
		yarn := map[string]any{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": int64(2048)}
		own := maps.Clone(yarn)
		own["truncate"] = false
		for _, override := range []map[string]any{
			{"rope_theta": 1e4, "rope_scaling": own},
			{"rope_theta": 1e4, "rope_parameters": map[string]any{"full_attention": yarn, "truncate": false}},
		} {
			config := must1(parse(t, source).Override(override))
			near.Value(t, fmt.Sprint(override), float64(config.Rope.Frequencies(16, 0)[3]), exact[0], 1e-8)
			if w := config.Warnings(); len(w) > 0 {
				t.Errorf("%v: warnings %q", override, w)
			}
		}
	}
}

const longRope = `{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
 "max_position_embeddings": 64, "rope_scaling": {"type": "su", "short_factor": [1, 1.5], "long_factor": [2, 4], "original_max_position_embeddings": 16}}`

// "su" is longrope. The list is chosen by one length for the whole batch: more than the original
// length means the long list.
func TestLongRope(t *testing.T) {
	c := parse(t, longRope)
	if c.Rope.Type != "longrope" || !c.Switches() || c.Rope.Factor != 4 || c.Positions() != 64 {
		t.Errorf("%+v", c.Rope)
	}
	for n, want := range map[int64]float32{0: 1, 16: 1, 17: 0.5, 64: 0.5, 100: 0.5} {
		if f := c.Rope.Frequencies(c.RotaryDim, n); f[0] != want {
			t.Errorf("length %d: %v, want %v first", n, f, want)
		}
	}
	text, err := c.JSON()
	if err != nil || strings.Contains(string(text), `"su"`) ||
		!strings.Contains(string(text), `"rope_type": "longrope"`) {
		t.Errorf("%v: %s", err, text)
	}
	// a field at the top is preferred to the one inside, as Phi-3 needs
	c = parse(t, strings.Replace(longRope, `"vocab_size"`, `"original_max_position_embeddings": 32, "vocab_size"`, 1))
	if c.Rope.OriginalMaxPositionEmbeddings != 32 || c.Rope.Factor != 2 {
		t.Errorf("%+v", c.Rope)
	}
}

// config.json has RoPE's parameters for transformers 4 and 5, and they agree.
func TestRopeFields(t *testing.T) {
	for _, source := range []string{qwen2, qwen3, llama31, longRope, qwen35,
		string(with(t, qwen3,
			`"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7}, "max_position_embeddings": 64`))} {
		c := parse(t, source)
		f := c.fields()
		new, ok := f["rope_parameters"].(map[string]any)
		if !ok || new["rope_type"] != c.Rope.Type || fmt.Sprint(new["rope_theta"]) != fmt.Sprint(f["rope_theta"]) {
			t.Fatalf("%v", f)
		}
		old, scaled := f["rope_scaling"].(map[string]any)
		if scaled != (c.Rope.Type != "default") || !scaled && f["rope_scaling"] != nil {
			t.Errorf("rope_scaling of %s: %v", c.Rope.Type, f["rope_scaling"])
		}
		for name, value := range old {
			if !reflect.DeepEqual(value, new[name]) {
				t.Errorf("%s is %v in rope_scaling and %v in rope_parameters", name, value, new[name])
			}
		}
		// either version alone reads the same
		for _, drop := range []string{"rope_parameters", "rope_scaling", ""} {
			g := map[string]any{}
			for name, value := range f {
				if name != drop {
					g[name] = value
				}
			}
			text, _ := json.Marshal(g)
			if again := parse(t, string(text)); !reflect.DeepEqual(again.Rope, c.Rope) ||
				again.RotaryDim != c.RotaryDim {
				t.Errorf("without %s: %+v, want %+v", drop, again.Rope, c.Rope)
			}
		}
	}
}

// A rope_scaling that is not empty replaces rope_parameters. A theta inside beats the one at the
// top.
func TestRopePrecedence(t *testing.T) {
	for fields, want := range map[string]Rope{
		`"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5}, "rope_scaling": {"rope_type": "dynamic", "factor": 3}, "rope_theta": 7`: {
			Type: "dynamic", Theta: 7, Factor: 3, OriginalMaxPositionEmbeddings: 40960},
		`"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5}, "rope_scaling": {}, "rope_theta": 7`: {
			Type: "linear", Theta: 5, Factor: 2},
		`"rope_parameters": {"rope_type": "linear", "factor": 2}, "rope_scaling": null, "rope_theta": 7`: {
			Type: "linear", Theta: 7, Factor: 2},
		`"rope_parameters": {"rope_type": "linear", "factor": 2}`: {
			Type: "linear", Theta: 10000, Factor: 2},
	} {
		if c := parse(t, string(with(t, qwen3, fields))); !reflect.DeepEqual(c.Rope, want) {
			t.Errorf("%s: %+v, want %+v", fields, c.Rope, want)
		}
	}
}

// An override of RoPE's fields replaces them wherever the file has them, keeps theta, and extends
// the model's positions.
func TestRopeOverride(t *testing.T) {
	yarn := map[string]any{"rope_type": "yarn", "factor": 4.0}
	for _, source := range []string{qwen2, qwen3,
		string(with(t, qwen3, `"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 1e6}`))} {
		before := parse(t, source)
		for _, name := range []string{"rope_scaling", "rope_parameters"} {
			c, err := before.Override(map[string]any{name: yarn})
			if err != nil {
				t.Fatal(err)
			}
			original := float64(before.MaxPositionEmbeddings)
			if c.Rope.Theta != 1e6 || c.Rope.Type != "yarn" || c.Rope.OriginalMaxPositionEmbeddings != original ||
				float64(c.MaxPositionEmbeddings) != 4*original {
				t.Errorf("%s: %+v, %d positions", name, c.Rope, c.MaxPositionEmbeddings)
			}
			text, _ := c.JSON()
			if again := parse(t, string(text)); !reflect.DeepEqual(again.Rope, c.Rope) ||
				again.MaxPositionEmbeddings != c.MaxPositionEmbeddings {
				t.Errorf("%s: written back: %+v", name, again.Rope)
			}
		}
		if c, err := before.Override(map[string]any{"rope_theta": 9.0, "rope_scaling": yarn,
			"max_position_embeddings": int64(1 << 20)}); err != nil ||
			c.Rope.Theta != 9 || c.MaxPositionEmbeddings != 1<<20 {
			t.Errorf("%+v, %v", c, err)
		}
	}
	for _, c := range []struct {
		scaling map[string]any
		want    string
	}{
		{map[string]any{"factor": 4.0}, `rope_scaling.factor has no effect with rope_type = "default"`},
		{map[string]any{"rope_type": "yarn", "factor": 4.0, "beta_fats": 3.0},
			"rope_scaling.beta_fats: unknown field; did you mean beta_fast?"},
		{map[string]any{"rope_type": "yarn"}, "rope_scaling.factor is missing"},
		{map[string]any{"rope_type": "yarn", "factor": -1.0}, "rope_scaling.factor = -1"},
		{map[string]any{"rope_type": "longrope", "short_factor": []any{1.0}, "long_factor": []any{1.0}},
			"rope_scaling.short_factor has 1 numbers for 64 pairs"},
		{map[string]any{"rope_type": "longrope", "short_factor": []any{}, "long_factor": []any{1.0}},
			"rope_scaling.short_factor = []: give a list with a number for each pair of features"},
		{map[string]any{"rope_type": "longrope", "short_factor": []any{0.0}, "long_factor": 3},
			"rope_scaling.short_factor[0] = 0"},
	} {
		_, err := parse(t, qwen3).Override(map[string]any{"rope_scaling": c.scaling})
		if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %q", c.scaling, err, c.want)
		}
	}
}

// Phi-3 has its original length outside of RoPE's table, where transformers reads it, also in saved
// files. A length in the table that has no effect is named.
func TestOriginalLength(t *testing.T) {
	const (
		base  = `{"model_type": "phi3", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64`
		table = `, "rope_scaling": {"type": "su", "short_factor": [1, 1.5], "long_factor": [2, 4], "original_max_position_embeddings": 16}`
	)
	for _, c := range []struct {
		fields string
		want   float64
		warns  bool
	}{
		{table, 4096, true},
		{table + `, "original_max_position_embeddings": 32`, 32, true},
		{table + `, "original_max_position_embeddings": 16`, 16, false},
	} {
		config := parse(t, base+c.fields+"}")
		warned := strings.Contains(strings.Join(config.Warnings(), " "),
			"rope_scaling.original_max_position_embeddings = 16 has no effect")
		if config.Rope.OriginalMaxPositionEmbeddings != c.want || warned != c.warns {
			t.Errorf("%s: %v, %q", c.fields, config.Rope.OriginalMaxPositionEmbeddings, config.Warnings())
		}
		text, _ := config.JSON()
		if again := parse(t, string(text)); !reflect.DeepEqual(again.Rope, config.Rope) || len(again.Warnings()) > 0 {
			t.Errorf("%s is read as %+v, %q", text, again.Rope, again.Warnings())
		}
	}
	scaling := map[string]any{"rope_type": "longrope", "short_factor": []any{1.0, 1.5}, "long_factor": []any{2.0, 4.0},
		"original_max_position_embeddings": int64(16)}
	overridden, err := parse(t, base+"}").Override(map[string]any{"rope_scaling": scaling})
	if err != nil {
		t.Fatal(err)
	}
	own := func(scaling map[string]any) *Config {
		c, err := ConfigFromMap(map[string]any{"model_type": "phi3", "vocab_size": int64(8), "hidden_size": int64(8),
			"intermediate_size": int64(8), "num_hidden_layers": int64(1),
			"num_attention_heads": int64(2), "max_position_embeddings": int64(16), "rope_parameters": scaling})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	without := maps.Clone(scaling)
	delete(without, "original_max_position_embeddings")
	for _, c := range []*Config{overridden, own(scaling), own(without)} {
		text, _ := c.JSON()
		if again := parse(t, string(text)); c.Rope.OriginalMaxPositionEmbeddings != 16 || len(c.Warnings()) > 0 ||
			!reflect.DeepEqual(again.Rope, c.Rope) {
			t.Errorf("%+v, %q, written as %s", c.Rope, c.Warnings(), text)
		}
	}
}

// One pass over short documents whose sequence is longer than the original length has the short
// list, and a long document changes it for all tokens. The frequencies of an earlier pass do not
// matter.
func TestSwitching(t *testing.T) {
	cfg := configs(t)["qwen3"] // longrope, 8 positions
	short, long := documents(cfg.VocabSize, 8, 3, 8, 5), documents(cfg.VocabSize, 8, 3, 9, 4)
	ranks(t, 1, func(c comm.Comm) error {
		r := newRank(c, cfg, 24, false)
		defer r.close()
		r.set(weights(r.Model))
		w := &reference{cfg: cfg, w: map[string][]float64{}}
		for name, x := range weights(r.Model) {
			w.w[name] = ref.Convert[float64](x)
		}
		want := map[*sequence]float64{short: w.loss(short), long: w.loss(long)}
		for _, s := range []*sequence{short, long, short, long, long} {
			l, err := r.Forward(r.c, shard(c, s))
			if err != nil {
				return err
			}
			near.Value(t, "loss", l.Sum, want[s], 2e-5*want[s])
		}
		b := shard(c, short)
		b.Length = 9
		l, err := r.Forward(r.c, b)
		if err != nil || !(math.Abs(l.Sum-want[short]) > 1e-3) {
			t.Errorf("loss %v with the long list, %v with the short one, %v", l.Sum, want[short], err)
		}
		b.Length = 0
		if _, err = r.Forward(r.c, b); status.Of(err) != status.InvalidArgument ||
			!strings.Contains(err.Error(), "set Length") {
			t.Error(err)
		}
		return nil
	})
}
