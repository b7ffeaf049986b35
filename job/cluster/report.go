package cluster

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"

	"ulysses/internal/status"
	"ulysses/internal/units"
)

// Report is what a check has found.
type Report struct {
	Ranks      []Facts
	Links      []Link
	Unmeasured int // pairs that no time was left for
	Findings   []Finding
}

// Code returns the code of the first finding that is more than advice; OK if there is none.
func (r *Report) Code() status.Code {
	for _, f := range r.Findings {
		if f.Code != status.OK {
			return f.Code
		}
	}
	return status.OK
}

// Advise adds texts "subject: what; what to do" as advice.
func (r *Report) Advise(texts []string) {
	for _, text := range texts {
		what, rest, _ := strings.Cut(text, ": ")
		r.Findings = append(r.Findings, Finding{status.OK, what, rest})
	}
}

// Print prints a table with a line for each node, then the findings.
func (r *Report) Print(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "node\tranks\tprogram\tdevice\tkernels\tFLOP/s of a rank\tfree memory\tclock\tslowest link")
	for _, first := range firsts(r.Ranks) {
		f := &r.Ranks[first]
		var ranks []int
		slowest, fastest, link := math.Inf(1), 0.0, math.Inf(1)
		for rank := range r.Ranks {
			if g := &r.Ranks[rank]; g.Host == f.Host {
				ranks = append(ranks, rank)
				if g.Rate > 0 {
					slowest, fastest = min(slowest, g.Rate), max(fastest, g.Rate)
				}
			}
		}
		for _, l := range r.Links {
			if r.Ranks[l.A].Host == f.Host || r.Ranks[l.B].Host == f.Host {
				link = min(link, l.Bytes)
			}
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", f.Host, span(ranks),
			strings.TrimPrefix(f.Program, "sha256 "), or(f.Device, "none"), or(f.Kernels, "-"),
			rate(slowest, fastest), units.GiB(f.Free), clock(f, first), perSecond(link))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	faults := 0
	for _, f := range r.Findings {
		kind := "advice: "
		if f.Code != status.OK {
			kind, faults = "", faults+1
		}
		if _, err := fmt.Fprintf(w, "\n%s%s: %s\n", kind, f.What, f.Text); err != nil {
			return err
		}
	}
	verdict := fmt.Sprintf("%s on %s: nothing is wrong", units.Count(len(r.Ranks), "rank"),
		units.Count(len(firsts(r.Ranks)), "node"))
	if faults > 0 {
		verdict = fmt.Sprintf("%s on %s: %s", units.Count(len(r.Ranks), "rank"),
			units.Count(len(firsts(r.Ranks)), "node"), units.Count(faults, "finding"))
	}
	_, err := fmt.Fprintf(w, "\n%s\n", verdict)
	return err
}

// span writes ranks as ranges: 0-3, or 0-1,4-5.
func span(ranks []int) string {
	var words []string
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		if i == j {
			words = append(words, fmt.Sprint(ranks[i]))
		} else {
			words = append(words, fmt.Sprintf("%d-%d", ranks[i], ranks[j]))
		}
		i = j + 1
	}
	return strings.Join(words, ",")
}

func or(text, instead string) string {
	if text == "" {
		return instead
	}
	return text
}

func rate(slowest, fastest float64) string {
	if fastest == 0 {
		return "-"
	}
	if low, high := units.Spaced(slowest), units.Spaced(fastest); low != high {
		return strings.TrimSpace(low) + " to " + strings.TrimSpace(high)
	}
	return strings.TrimSpace(units.Spaced(fastest))
}

func clock(f *Facts, rank int) string {
	if rank == 0 {
		return "reference"
	}
	return fmt.Sprintf("%+.2g ms ± %.2g", 1e3*f.ClockOff, 1e3*f.ClockUncertainty)
}

func perSecond(bytes float64) string {
	if math.IsInf(bytes, 1) {
		return "-"
	}
	return units.Spaced(bytes) + "B/s"
}
