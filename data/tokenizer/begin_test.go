package tokenizer

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// The marks before a text come from the TemplateProcessing, as in the `tokenizers` package, and
// wrong ones are refused.
func TestBegin(t *testing.T) {
	const ids = `"special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<end>"]}, "<two>": {"id": "<two>", "ids": [1, 2], "tokens": ["b", "ab"]}}`
	template := func(names ...string) string {
		var single []string
		for _, n := range names {
			piece := `{"SpecialToken": {"id": "` + n + `", "type_id": 0}}`
			if n == "A" {
				piece = `{"Sequence": {"id": "A", "type_id": 0}}`
			}
			single = append(single, piece)
		}
		return `{"type": "TemplateProcessing", "single": [` + strings.Join(single, ", ") + `], "pair": [], ` + ids + `}`
	}
	for post, want := range map[string]struct {
		begin []int32
		fault string
	}{
		`null`:                               {},
		`{"type": "ByteLevel"}`:              {},
		template("A"):                        {},
		template("A", "<s>"):                 {},
		template("<s>", "A"):                 {begin: []int32{4}},
		template("<two>", "<s>", "A", "<s>"): {begin: []int32{1, 2, 4}},
		`{"type": "Sequence", "processors": [{"type": "ByteLevel"}, ` + template("<s>", "A") +
			`]}`: {begin: []int32{4}},
		`{"type": "Sequence", "processors": [` + template("<s>", "A") + `, ` + template("<two>", "A") +
			`]}`: {begin: []int32{4}},
		`{"type": "Sequence", "processors": [` + template("A") + `, ` + template("<two>", "A") +
			`]}`: {begin: []int32{1, 2}},
		`{"type": "Sequence", "processors": [` + template("A", "<s>") + `, ` + template("<two>", "A") + `]}`: {},
		template("<other>", "A"): {fault: `post_processor: special_tokens does not have "<other>"`},
		strings.ReplaceAll(template("<s>", "A"), `"ids": [4]`,
			`"ids": [5]`): {fault: `post_processor: "<s>" has the id 5, the tokenizer has the ids 0 to 4`},
		`{"type": "TemplateProcessing", "single": "<s> $A"}`: {fault: "post_processor: "},
	} {
		f := small()
		f["post_processor"] = json.RawMessage(post)
		tok, err := Open(write(t, t.TempDir(), "tokenizer.json", f))
		if want.fault != "" {
			if status.Of(err) != status.InvalidConfig || !strings.Contains(err.Error(), want.fault) {
				t.Errorf("%s: %v, want %q", post, err, want.fault)
			}
			continue
		}
		if err != nil || !slices.Equal(tok.Begin(), want.begin) {
			t.Errorf("%s: %v, want %v", post, err, want.begin)
		}
	}
}
