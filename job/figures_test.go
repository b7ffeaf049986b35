package job

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"

	"ulysses/testkit/near"
)

// figures is the content of docs/figures.json, the only source of numbers that the documents quote
// from runs of the examples. `make figures` writes it.
type figures struct {
	Text struct {
		File    string `json:"file"`
		Bytes   int    `json:"bytes"`
		SHA256  string `json:"sha256"`
		HeldOut int    `json:"held_out_bytes"`

		Smoothing float64 `json:"smoothing"` // added to each count
	} `json:"text"`
	NGrams     map[string]float64 `json:"ngrams"` // nats a byte
	Hybrid     exampleRun         `json:"hybrid"`
	Quickstart exampleRun         `json:"quickstart"`
}

type exampleRun struct {
	Steps   int      `json:"steps"`
	Loss    float64  `json:"loss"`
	HeldOut float64  `json:"held_out"`
	Seconds int      `json:"seconds"`
	Output  []string `json:"output"`
}

func readFigures(t *testing.T) (f figures) {
	t.Helper()
	if err := json.Unmarshal([]byte(text(t, "../docs/figures.json")), &f); err != nil {
		t.Fatal(err)
	}
	return f
}

var ngramTables = []string{"bytes alone", "bigrams", "trigrams", "4-grams"}

// The n-gram tables of docs/figures.json are correct: counted on the first part of the text,
// measured on the part that eval.split holds out.
func TestFiguresOfTheText(t *testing.T) {
	f := readFigures(t)
	data := text(t, "../"+f.Text.File)
	if sum := fmt.Sprintf("%x", sha256.Sum256([]byte(data))); len(data) != f.Text.Bytes || sum != f.Text.SHA256 {
		t.Fatalf("%s has %d bytes, sha256 %s; docs/figures.json has %+v", f.Text.File, len(data), sum, f.Text)
	}
	cut := len(data) - f.Text.HeldOut
	for i, table := range ngramTables {
		n, whole, context := i+1, map[string]float64{}, map[string]float64{}
		for at := 0; at+n <= cut; at++ {
			whole[data[at:at+n]]++
			context[data[at:at+n-1]]++
		}
		nats := 0.0
		for at := cut; at < len(data); at++ {
			gram := data[at-n+1 : at+1]
			nats -= math.Log((whole[gram] + f.Text.Smoothing) / (context[gram[:n-1]] + 256*f.Text.Smoothing))
		}
		near.Value(t, table+" in docs/figures.json", nats/float64(f.Text.HeldOut), f.NGrams[table], 0.00006)
	}
}

// quoted finds numbers with two or more decimals.
var quoted = regexp.MustCompile(`\b\d+\.\d{2,}\b`)

// The documents quote docs/figures.json: the output of `make run` line by line, and every other
// number with decimals, rounded.
func TestFiguresInTheDocuments(t *testing.T) {
	f := readFigures(t)
	values := []float64{f.Text.Smoothing, f.Hybrid.Loss, f.Hybrid.HeldOut, f.Quickstart.Loss, f.Quickstart.HeldOut}
	for _, x := range f.NGrams {
		values = append(values, x)
	}
	known := func(number string) bool {
		decimals := len(number) - strings.IndexByte(number, '.') - 1
		return slices.ContainsFunc(values, func(x float64) bool { return fmt.Sprintf("%.*f", decimals, x) == number })
	}
	check := func(file, what string, least int) {
		all := quoted.FindAllString(what, -1)
		for _, number := range all {
			if !known(number) {
				t.Errorf("%s quotes %s, which is not in docs/figures.json", file, number)
			}
		}
		if len(all) < least {
			t.Errorf("%s quotes %d numbers, want %d", file, len(all), least)
		}
	}

	readme := section(t, text(t, "../README.md"), "## What it looks like")
	block := "    " + strings.ReplaceAll(strings.Join(f.Hybrid.Output, "\n    "), "\n    \n", "\n\n") + "\n"
	before, after, ok := strings.Cut(readme, block)
	if !ok {
		t.Errorf("README.md does not have what the run printed:\n%s", block)
	}
	prose := strings.Join(strings.Fields(before+after), " ")
	check("README.md", prose, 3)
	for _, want := range []string{fmt.Sprintf("%.2f", f.Hybrid.HeldOut), fmt.Sprintf("%.2f", f.Quickstart.HeldOut),
		fmt.Sprintf("%.2f", f.NGrams["4-grams"]), fmt.Sprintf("in %d seconds", f.Hybrid.Seconds)} {
		if !strings.Contains(prose, want) {
			t.Errorf("README.md does not quote %q", want)
		}
	}

	page := text(t, "../examples/data/README.md")
	check("examples/data/README.md", page, len(ngramTables))
	for _, table := range ngramTables {
		if row := fmt.Sprintf("\n| %s | %.2f |", table, f.NGrams[table]); !strings.Contains(page, row) {
			t.Errorf("examples/data/README.md has no row %q", row)
		}
	}
	if !strings.Contains(page, f.Text.SHA256) ||
		!strings.Contains(strings.ReplaceAll(page, ",", ""), fmt.Sprint(f.Text.Bytes)) {
		t.Error("examples/data/README.md is of another text")
	}

	for _, x := range []struct {
		file string
		run  exampleRun
	}{{"hybrid", f.Hybrid}, {"quickstart", f.Quickstart}} {
		source := text(t, "../examples/"+x.file+".toml")
		head, _, _ := strings.Cut(source, "kind =")
		check(x.file+".toml", head, 1)
		if want := fmt.Sprintf("After %d steps the loss on the held-out part of the book is %.2f nats a byte.",
			x.run.Steps, x.run.HeldOut); !strings.Contains(head, want) {
			t.Errorf("%s.toml does not say %q", x.file, want)
		}
		if !strings.Contains(source, fmt.Sprintf("steps = %d\n", x.run.Steps)) {
			t.Errorf("%s.toml does not have %d steps", x.file, x.run.Steps)
		}
	}

	labels := strings.Join(regexp.MustCompile(`<!--.*?-->`).FindAllString(text(t, "../docs/quickstart.svg"), -1), "\n")
	check("docs/quickstart.svg", labels, 5)
	for _, want := range []string{"held-out part of the book: " + fmt.Sprintf("%.2f", f.Hybrid.HeldOut),
		"4-grams: " + fmt.Sprintf("%.2f", f.NGrams["4-grams"])} {
		if !strings.Contains(labels, want) {
			t.Errorf("docs/quickstart.svg does not say %q", want)
		}
	}
}

// section returns the text of a document from a heading to the next one.
func section(t *testing.T, document, heading string) string {
	t.Helper()
	_, body, ok := strings.Cut(document, heading+"\n")
	if !ok {
		t.Fatalf("no heading %q", heading)
	}
	body, _, _ = strings.Cut(body, "\n## ")
	return body
}
