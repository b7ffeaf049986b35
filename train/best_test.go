package train

import (
	"strings"
	"testing"

	"ulysses/checkpoint"
)

// Losses of other evaluations are not compared, also if only their sequences have another length.
// The warning has the metric, and not the digest of the data.
func TestOtherEvaluations(t *testing.T) {
	c := &Checkpoints{Best: true}
	for of, want := range map[string]string{
		"eval.metric = books, b19a5bcf56e17657": "after step 7 (eval.metric = books), and the comparison begins anew",
		"4dbd6c4eca9a50b7":                      "after step 7, and the comparison begins anew",
	} {
		best, note, err := c.continueBest(&checkpoint.Best{Of: of, Loss: 3, Step: 7}, &Track{Of: "other"})
		if best != nil || err != nil || !strings.HasSuffix(note, want) ||
			!strings.Contains(note, "the length of their sequences") {
			t.Errorf("%s: %v, %q, %v", of, best, note, err)
		}
	}
}
