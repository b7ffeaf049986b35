package report

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"sort"
	"strconv"
)

// phaseRow is one phase over all ranks, in seconds.
type phaseRow struct {
	Name           string // of the clock; clock.Label is its name for readers
	Calls          int64
	Mean, Min, Max float64
	Waiting        float64 // mean seconds, of Mean, in which ranks waited for other ranks
	Share          float64 // of the sum of all means, 0 to 1
}

// phaseRows adds up the clocks of the ranks, the longest phase first. A phase that one rank lacks
// counts as 0 there.
func phaseRows(facts []rankFacts) []phaseRow {
	rows, index, seen := []phaseRow{}, map[string]int{}, map[string]int{}
	all := 0.0
	for _, f := range facts {
		for _, p := range f.Phases {
			i, ok := index[p.Name]
			if !ok {
				i = len(rows)
				index[p.Name] = i
				rows = append(rows, phaseRow{Name: p.Name, Calls: p.Calls, Min: p.Seconds})
			}
			r, mean := &rows[i], p.Seconds/float64(len(facts))
			seen[p.Name]++
			r.Mean += mean
			r.Waiting += p.Waiting / float64(len(facts))
			all += mean
			r.Min, r.Max = min(r.Min, p.Seconds), max(r.Max, p.Seconds)
		}
	}
	for i := range rows {
		if r := &rows[i]; all > 0 {
			r.Share = r.Mean / all
		}
		if seen[rows[i].Name] < len(facts) {
			rows[i].Min = 0
		}
	}
	sort.SliceStable(rows, func(i, j int) bool { return rows[i].Mean > rows[j].Mean })
	return rows
}

// Moving returns the mean seconds of a phase of communication that are not spent waiting.
func (r phaseRow) Moving() float64 { return max(0, r.Mean-r.Waiting) }

// phaseNames lists the phases in the order of the style's colours, so a phase has the same colour
// in every chart and report. The first phases take most of a step's time and have the most distinct
// colours.
var phaseNames = []string{"exchange", "mlp", "projection", "attention", "reduce", "linear-attention", "norm", "loss",
	"optimizer", "rope", "checkpoint", "wait", "embedding", "data", "diagnosis"}

// phaseColours is the number of colours for phases in the style.
const phaseColours = 16

// colouredPhase is a phase with its colour in the style.
type colouredPhase struct {
	phaseRow
	Colour int
}

func coloured(rows []phaseRow) (all []colouredPhase) {
	next := len(phaseNames)
	for _, r := range rows {
		i := slices.Index(phaseNames, r.Name)
		if i < 0 {
			i, next = min(next, phaseColours-1), next+1
		}
		all = append(all, colouredPhase{r, i})
	}
	return all
}

// bar is the time of one rank, as a row of coloured segments.
type bar struct {
	Rank     int
	Total    float64 // seconds
	Segments []segment
}

// segment is the time of one phase in a bar.
type segment struct {
	Name    string
	Colour  int // in the style
	Seconds float64
	Percent template.CSS // of the longest bar
}

// mostBars is the largest number of ranks with a bar each.
const mostBars = 64

// bars returns a bar of times for each rank. With more than mostBars ranks it returns an evenly
// spaced selection and its description; the table has all ranks.
func bars(facts []rankFacts, phases []colouredPhase) (all []bar, selection string) {
	longest := 0.0
	n := min(len(facts), mostBars)
	for i := range n {
		rank := i * len(facts) / n
		b := bar{Rank: rank}
		seconds := map[string]float64{}
		for _, p := range facts[rank].Phases {
			seconds[p.Name] = p.Seconds
			b.Total += p.Seconds
		}
		for _, p := range phases {
			if x := seconds[p.Name]; x > 0 {
				b.Segments = append(b.Segments, segment{Name: p.Name, Colour: p.Colour, Seconds: x})
			}
		}
		longest = math.Max(longest, b.Total)
		all = append(all, b)
	}
	for i := range all {
		for j := range all[i].Segments {
			x := &all[i].Segments[j]
			x.Percent = template.CSS(strconv.FormatFloat(100*x.Seconds/longest, 'f', 3, 64))
		}
	}
	if n < len(facts) {
		selection = fmt.Sprintf("%d of %d ranks", n, len(facts))
	}
	return all, selection
}
