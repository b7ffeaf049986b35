package job

import (
	"fmt"
	"io"
	"text/tabwriter"

	"ulysses/internal/units"
	"ulysses/train"
)

// printChoices prints what becomes of activations and what it costs, beside the other ways that
// were looked at, where there was something to choose or to do.
func (s *session) printChoices(out io.Writer) error {
	choices := s.trainer.Choices()
	if len(choices) == 1 && choices[0].Extra == 0 && !choices[0].Offloads() {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "activations\tMiB\ton the host\texpected time\t")
	for _, c := range choices {
		mark := ""
		if c.Taken {
			mark = "taken"
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%s\t%s\n", wayOf(c), units.MiB(c.Device), units.MiB(c.Host), fmt.Sprintf("+%.1f %%", 100*c.Extra), mark)
	}
	fmt.Fprintln(w)
	return w.Flush()
}

// wayOf says what a choice does.
func wayOf(c train.Choice) string {
	text := c.Activations.String()
	if c.Tiles.MLP > 0 {
		text += fmt.Sprintf(" in tiles of %d", c.Tiles.MLP)
	}
	return text
}
