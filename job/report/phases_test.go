package report

import (
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"ulysses/internal/clock"
)

// Every phase that the program enters has one colour, which is the same in every report.
func TestPhasesHaveTheirOwnColours(t *testing.T) {
	entered := regexp.MustCompile(`\b(?:phase|Push)\("([a-z-]+)"\)|phase :?= "([a-z-]+)"`)
	found := 0
	for _, dir := range []string{"../../comm", "../../model", "../../train"} {
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			source, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range entered.FindAllStringSubmatch(string(source), -1) {
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
			if want := map[string]int{"data": slices.Index(phaseNames, "data"), "exchange": 0,
				"somewhere": len(phaseNames)}[p.Name]; p.Colour != want {
				t.Errorf("%s has colour %d, want %d", p.Name, p.Colour, want)
			}
		}
	}
	facts := []rankFacts{
		{Phases: []clock.Phase{{Name: "mlp", Calls: 1, Seconds: 1}, {Name: "data", Calls: 1, Seconds: 2}}}}
	phases := coloured(phaseRows(facts))
	all, _ := bars(facts, phases)
	for i, p := range all[0].Segments {
		if p.Name != phases[i].Name || p.Colour != phases[i].Colour {
			t.Errorf("bar %+v, table %+v", p, phases[i])
		}
	}
}

// The run table and the rows of the page separate waiting from moving, and phases without waiting
// have no such row.
func TestWaitingIsSeparate(t *testing.T) {
	facts := []rankFacts{
		{Phases: []clock.Phase{{Name: "exchange", Calls: 2, Seconds: 4, Waiting: 3},
			{Name: "mlp", Calls: 1, Seconds: 4}}},
		{Phases: []clock.Phase{{Name: "exchange", Calls: 2, Seconds: 6, Waiting: 1},
			{Name: "mlp", Calls: 1, Seconds: 6}}},
	}
	rows := phaseRows(facts)
	if r := rows[0]; r.Name != "exchange" || r.Mean != 5 || r.Waiting != 2 || r.Moving() != 3 {
		t.Errorf("%+v", rows)
	}
	var out strings.Builder
	r := Run{Stdout: &out, Details: io.Discard}
	if err := r.printPhases(rows); err != nil {
		t.Fatal(err)
	}
	lines := regexp.MustCompile(` +`).ReplaceAllString(out.String(), " ")
	if want := " communication 2 5.000 1.50 50.0 %\n of it, waiting for ranks 2.000 20.0 %\n mlp 1 5.000 1.50 50.0 %\n"; !strings.HasSuffix(
		lines, want) {
		t.Errorf("%q does not end with %q", lines, want)
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
		"all cones": identity,
		"protanopia": {{0.152286, 1.052583, -0.204868}, {0.114503, 0.786281, 0.099216},
			{-0.003882, -0.048116, 1.051998}},
		"deuteranopia": {{0.367322, 0.860646, -0.227968}, {0.280085, 0.672501, 0.047413},
			{-0.011820, 0.042940, 0.968881}},
	} {
		for theme := range 2 {
			var seen [][3]float64
			for i, c := range style[theme*phaseColours:][:phaseColours] {
				if c[1] != strconv.Itoa(i) {
					t.Fatalf("colour %d is --c%s", i, c[1])
				}
				lab := cielab(t, c[2], eye)
				for j, other := range seen {
					if d := math.Sqrt(sq(lab[0]-other[0]) + sq(lab[1]-other[1]) + sq(lab[2]-other[2])); !(d >= 14) {
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
	c = times([3][3]float64{{0.4124564, 0.3575761, 0.1804375}, {0.2126729, 0.7151522, 0.0721750},
		{0.0193339, 0.1191920, 0.9503041}}, c)
	for i, white := range []float64{0.95047, 1, 1.08883} {
		x := c[i] / white
		if c[i] = (24389.0/27*x + 16) / 116; x > 216.0/24389 {
			c[i] = math.Cbrt(x)
		}
	}
	return [3]float64{116*c[1] - 16, 500 * (c[0] - c[1]), 200 * (c[1] - c[2])}
}
