package job

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"strconv"
)

// phaseNames lists the phases in the order of the style's colours, so a phase has the same colour
// in every chart and report. The first phases take most of a step's time and have the most distinct
// colours.
var phaseNames = []string{"exchange", "mlp", "projection", "attention", "reduce", "linear-attention", "norm", "loss", "optimizer", "rope", "checkpoint", "wait", "embedding",
	"data", "diagnosis"}

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

// mostBars is the largest number of ranks with a bar each.
const mostBars = 64

// bars returns a bar of times for each rank. With more than mostBars ranks it returns an evenly
// spaced selection; the table has all ranks.
func bars(facts []rankFacts, phases []colouredPhase) (all []bar, of string) {
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
				b.Parts = append(b.Parts, barPart{Name: p.Name, Colour: p.Colour, Seconds: x})
			}
		}
		longest = math.Max(longest, b.Total)
		all = append(all, b)
	}
	for i := range all {
		for j := range all[i].Parts {
			x := &all[i].Parts[j]
			x.Percent = template.CSS(strconv.FormatFloat(100*x.Seconds/longest, 'f', 3, 64))
		}
	}
	if n < len(facts) {
		of = fmt.Sprintf("%d of %d ranks", n, len(facts))
	}
	return all, of
}
