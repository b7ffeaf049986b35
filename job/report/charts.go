package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// chart is one chart of the page, in the form that the page's script reads.
type chart struct {
	Title  string  `json:"title"`
	Axis   string  `json:"axis"`  // label of the vertical axis, with its unit
	Scale  float64 `json:"scale"` // value = number on the axis × Scale
	Log    bool    `json:"log"`
	Series []curve `json:"series"`
}

// curve is a line of a chart. Its style is "line", "faint" or "dots".
type curve struct {
	Name  string     `json:"name"`
	Style string     `json:"style"`
	Set   int        `json:"set,omitempty"` // number of the set of eval.set, from 1, which has a colour of its own
	X     []float64  `json:"x"`
	Y     []*float64 `json:"y"` // null = NaN or Inf
}

func newCurve(name, style string, p points) curve {
	p = p.thin(mostPoints)
	c := curve{Name: name, Style: style, X: p.X, Y: make([]*float64, len(p.Y))}
	for i, y := range p.Y {
		if !math.IsNaN(y) && !math.IsInf(y, 0) {
			c.Y[i] = &p.Y[i]
		}
	}
	return c
}

// newChart returns a chart whose axis has one unit, with a prefix or a power of ten if the numbers
// are large or small.
func newChart(title, quantity, unit string, series ...curve) chart {
	c := chart{Title: title, Series: series}
	var name string
	c.Scale, name = axisScale(largest(series), unit)
	if c.Axis = quantity; name != "" {
		c.Axis += ", " + name
	}
	return c
}

// largest returns the largest magnitude.
func largest(series []curve) (most float64) {
	for _, c := range series {
		for _, y := range c.Y {
			if y != nil {
				most = max(most, math.Abs(*y))
			}
		}
	}
	return most
}

// prefixes maps powers of 1000 to the prefixes of units.
var prefixes = map[int]string{-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}

// prefixed lists the units that take a prefix, with the text between prefix and unit and the power
// of 1000 of their values.
var prefixed = map[string]struct {
	gap   string
	power int
}{"tokens/s": {" ", 0}, "FLOP/s": {"", 4}}

// axisScale returns one scale for all numbers of an axis, by the largest: a prefix of the unit, or
// a power of ten.
func axisScale(most float64, unit string) (scale float64, name string) {
	least := 1e-2
	u, takesPrefix := prefixed[unit]
	if takesPrefix {
		least = 1
	}
	power := 0
	if most > 0 && (most < least || most >= 1e4) {
		power = int(math.Floor(math.Log10(most)))
	}
	thousands := int(math.Floor(float64(power) / 3))
	if prefix, ok := prefixes[thousands+u.power]; takesPrefix && ok {
		return math.Pow(1000, float64(thousands)), strings.TrimSpace(prefix + u.gap + unit)
	}
	if power == 0 {
		return 1, unit
	}
	return math.Pow(10, float64(power)), strings.TrimSpace(unit + " × 10" + superscript(power))
}

func superscript(n int) string {
	return strings.NewReplacer("-", "⁻", "0", "⁰", "1", "¹", "2", "²", "3", "³", "4", "⁴", "5", "⁵", "6", "⁶", "7", "⁷",
		"8", "⁸", "9", "⁹").Replace(strconv.Itoa(n))
}

// The loss of a run with fewer than leastSmoothed steps is not smoothed. Otherwise the window is a
// thirtieth of the run, at least leastWindow and at most mostWindow steps.
const (
	leastSmoothed = 20
	leastWindow   = 5
	mostWindow    = 500
)

// smooth returns the exponentially weighted mean of the points up to each one, and the number of
// points over which the weights fall to 1/e. The mean is divided by the sum of weights, so the
// first points have no bias. NaN and Inf have no weight.
func (p points) smooth() (points, int) {
	window := min(max(len(p.X)/30, leastWindow), mostWindow)
	keep, sum, weight := 1-1/float64(window), 0.0, 0.0
	s := points{X: p.X, Y: make([]float64, len(p.Y))}
	for i, y := range p.Y {
		if s.Y[i] = math.NaN(); math.IsNaN(y) || math.IsInf(y, 0) {
			continue
		}
		sum, weight = keep*sum+(1-keep)*y, keep*weight+(1-keep)
		s.Y[i] = sum / weight
	}
	return s, window
}

// charts returns the charts of the run; none if there was no step.
func (h *history) charts() []chart {
	all := []chart{}
	if h.Steps == 0 {
		return all
	}
	losses := []curve{newCurve("each step", "line", h.loss)}
	if len(h.loss.X) >= leastSmoothed {
		smoothed, window := h.loss.smooth()
		losses[0].Style = "faint"
		losses = append(losses, newCurve(fmt.Sprintf("smoothed over %d steps", window), "line", smoothed))
	}
	if len(h.eval.X) > 0 {
		losses = append(losses, newCurve("held out", "dots", h.eval))
		for i, name := range h.Sets {
			c := newCurve("held out: "+name, "dots", *h.ofSet[name])
			c.Set = i + 1
			losses = append(losses, c)
		}
	}
	norm := newChart("Gradient norm", "norm before clipping", "", newCurve("gradient norm", "line", h.gradNorm))
	if norm.Log = positive(h.gradNorm.Y); norm.Log {
		norm.Axis, norm.Scale = "norm before clipping", 1 // the axis has powers of ten as ticks
	}
	return append(all, newChart("Loss", "loss", "nats a token", losses...), norm,
		newChart("Learning rate", "learning rate", "", newCurve("learning rate", "line", h.rate)),
		newChart("Speed", "all ranks", "tokens/s", newCurve("speed", "line", h.speed)),
		newChart("Model FLOP/s", "a rank, causal", "FLOP/s", newCurve("model FLOP/s", "line", h.flops)))
}

// positive reports whether all numbers are positive, which a logarithmic axis requires. It returns
// false if there is no number.
func positive(y []float64) bool {
	some := false
	for _, v := range y {
		if v <= 0 {
			return false
		}
		some = some || v > 0
	}
	return some
}
