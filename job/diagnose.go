package job

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"ulysses/internal/flight"
	"ulysses/internal/status"
)

// diagnose is the verb diagnose. o.words is the folder of the records, or an output.dir.
func diagnose(o Options) error {
	dir := o.words[0]
	if !isFolder(dir) {
		return status.Errorf(status.IO,
			"diagnose: there is no folder %s, and a run that ends without a fault removes its folder flight; name the output.dir of a run that hangs or has failed",
			dir)
	}
	if inside := filepath.Join(dir, flightFolder); isFolder(inside) {
		dir = inside
	}
	d, err := flight.Find(dir)
	if err != nil {
		return err
	}
	if o.json {
		text, err := json.MarshalIndent(d, "", "  ")
		if err != nil {
			return status.Errorf(status.Internal, "%w", err)
		}
		return written(fmt.Fprintf(o.Stdout, "%s\n", text))
	}
	w := tabwriter.NewWriter(o.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ranks\thost\tsteps\tstate\toperation\ts\twaits for")
	for _, run := range groupAlike(d.Ranks) {
		s := &run[0]
		fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%s\t%.1f\t%s\n", span(run), dash(s.Host), s.Step, s.Condition,
			dash(s.Operation), s.Seconds, dash(some(s.Awaits)))
	}
	fmt.Fprintf(w, "\n%s\n", d.Text)
	for _, c := range d.Culprits {
		if stack := flight.StackFile(dir, c.Rank); isFile(stack) {
			fmt.Fprintf(w, "stacks of rank %d: %s\n", c.Rank, stack)
		}
	}
	return written(0, w.Flush())
}

// groupAlike groups consecutive ranks of one host that do the same.
func groupAlike(all []flight.Standing) (runs [][]flight.Standing) {
	same := func(a, b *flight.Standing) bool {
		return a.Host == b.Host && a.Condition == b.Condition && a.Operation == b.Operation && a.Step == b.Step &&
			fmt.Sprint(a.Awaits) == fmt.Sprint(b.Awaits)
	}
	for i := range all {
		if n := len(runs); n > 0 && same(&runs[n-1][0], &all[i]) {
			runs[n-1] = append(runs[n-1], all[i])
		} else {
			runs = append(runs, all[i:i+1:i+1])
		}
	}
	return runs
}

func span(run []flight.Standing) string {
	if len(run) == 1 {
		return fmt.Sprint(run[0].Rank)
	}
	return fmt.Sprintf("%d-%d", run[0].Rank, run[len(run)-1].Rank)
}

// some returns the first of many ranks.
func some(ranks []int) string {
	words := make([]string, 0, len(ranks))
	for i, r := range ranks {
		if i == 4 {
			words = append(words, fmt.Sprintf("and %d more", len(ranks)-i))
			break
		}
		words = append(words, fmt.Sprint(r))
	}
	return strings.Join(words, ", ")
}

func dash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}
