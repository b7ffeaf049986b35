package data

import (
	"errors"
	"fmt"
	"math"

	"ulysses/internal/status"
)

// fault is an error in a file, without its absolute position: the numbers of its line and document
// are known after everything before it has been counted. Ranks send it to each other as JSON.
type fault struct {
	File int // index of the file in the scan
	// Line and Doc count from the first line and document of the unit; none = unknown. Document -1
	// started before the unit.
	Line, Doc int64
	Code      status.Code
	Text      string // the message after the position
}

// none is the value of an unknown line or document.
const none = math.MinInt64

func (f *fault) Error() string { return f.Text }

// faultOf returns the fault in err's chain, or a new one with the text of err.
func faultOf(err error, file int) *fault {
	var f *fault
	if !errors.As(err, &f) {
		f = &fault{Line: none, Doc: none, Code: status.Of(err), Text: err.Error()}
	}
	f.File = file
	return f
}

// located returns the error with its position. lines and docs are the lines of the file and the
// documents of the scan before the fault's unit.
func (f *fault) located(path string, lines, docs int64) error {
	where := path
	if f.Line == none && f.Doc == none {
		return &status.Error{Code: f.Code, Text: f.Text}
	}
	if f.Line != none {
		where += fmt.Sprintf(":%d", lines+f.Line+1)
	}
	if f.Doc != none {
		where += fmt.Sprintf(" (document %d)", docs+f.Doc)
	}
	return &status.Error{Code: f.Code, Text: where + f.Text}
}

// outsideVocabulary returns the end of the message about a token id that the model does not have.
func outsideVocabulary(position, id, vocab int64) string {
	return fmt.Sprintf(", position %d: token id %d is outside the model's vocabulary of %d (ids 0 to %d); use data made with the model's tokenizer",
		position, id, vocab, vocab-1)
}
