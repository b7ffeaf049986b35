package tokenizer

import (
	"encoding/json"
	"slices"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// postProcessor is the post_processor of a file. Only the special tokens that a TemplateProcessing
// puts before a text have an effect here.
type postProcessor struct {
	Kind       string          `json:"type"`
	Processors []postProcessor `json:"processors"` // of a Sequence
	Single     []struct {
		Special *struct {
			Name string `json:"id"`
		} `json:"SpecialToken"`
	} `json:"single"`
	Tokens map[string]struct {
		IDs []int32 `json:"ids"`
	} `json:"special_tokens"`
}

// readBegin returns the ids that a post-processor puts before a text. ids are less than size.
func readBegin(raw json.RawMessage, size int64) (begin []int32, err error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var p postProcessor
	if err := input.JSON(raw, &p); err != nil {
		return nil, status.Errorf(status.InvalidConfig, "post_processor: %w", err)
	}
	begin, _, err = p.begin(size)
	return begin, err
}

// begin returns the ids that the post-processor puts before a text. adds reports whether it puts
// tokens before or behind a text.
func (p *postProcessor) begin(size int64) (begin []int32, adds bool, err error) {
	for i := range p.Processors { // only the first that adds tokens has an effect
		if begin, adds, err = p.Processors[i].begin(size); adds || err != nil {
			return begin, adds, err
		}
	}
	if p.Kind != "TemplateProcessing" {
		return nil, false, nil
	}
	before := true
	for _, piece := range p.Single {
		if piece.Special == nil { // the text
			before = false
			continue
		}
		adds = true
		ids := p.Tokens[piece.Special.Name].IDs
		if len(ids) == 0 {
			return nil, false,
				status.Errorf(status.InvalidConfig,
					"post_processor: special_tokens does not have %s; add it with its ids",
					input.Quote(piece.Special.Name))
		}
		for _, id := range ids {
			if id < 0 || int64(id) >= size {
				return nil, false,
					status.Errorf(status.InvalidConfig,
						"post_processor: %s has the id %d, the tokenizer has the ids 0 to %d; set it to one of them",
						input.Quote(piece.Special.Name), id, size-1)
			}
		}
		if before {
			begin = append(begin, ids...)
		}
	}
	return begin, adds, nil
}

// InsertBegin inserts the ids that begin a text (Tokenizer.Begin) before the text that starts at
// ids[at], unless it begins with them.
func InsertBegin(ids []int32, at int, begin []int32) []int32 {
	if n := len(begin); n == 0 || len(ids)-at >= n && slices.Equal(ids[at:at+n], begin) {
		return ids
	}
	return slices.Insert(ids, at, begin...)
}
