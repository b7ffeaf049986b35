package tokenizer

import (
	"ulysses/internal/input"
	"ulysses/internal/status"
)

// Limits on a tokenizer.json. Published files stay far below: a pipeline has about ten parts, a
// prefix about six bytes, a pattern about 500 characters. Without limits a file of a few lines
// could use unlimited memory: forty Replaces of "e" by "ee" make 2^40 bytes of one.
const (
	mostParts = 32 // of a normalizer, a pre-tokenizer or a decoder, sequences flattened
	// bytes of what Replace and Prepend put in, and of a prefix or suffix of the model
	mostContent = 1 << 10
	mostPattern = 1 << 14 // bytes of a pattern
	mostAdded   = 1 << 20 // bytes of all added tokens together
	// A text may become this many times as long on its way to the model, and roomBytes longer. NFKC
	// and NFKD make up to 11 bytes of one, ByteLevel two.
	growth    = 32
	roomBytes = 4096
	// Steps that patterns may take on a text: stepsOfByte for each byte, and roomSteps. Published
	// tokenizers take at most 14 a byte.
	stepsOfByte = 512
	roomSteps   = 1 << 20
)

// stepsOf is the number of steps that all patterns together may take on a text of so many bytes.
func stepsOf(text int) int64 { return stepsOfByte*int64(text) + roomSteps }

// tooSlow refuses a pattern that backtracks: (a+)+b takes 2^n steps on n letters a.
func tooSlow(text int) error {
	return status.Errorf(status.Unsupported, "tokenizer: its patterns take more than %d steps on a text of %d bytes: replace the pattern in tokenizer.json that repeats a repetition, such as (a+)+",
		stepsOf(text), text)
}

// limitOf returns the largest number of bytes that a text may become.
func limitOf(text int) int { return growth*text + roomBytes }

// tooLong returns an error for a text that is longer than its limit.
func tooLong(n, limit int) error {
	return status.Errorf(status.Unsupported, "tokenizer: its normalizers and pre-tokenizers make more than %d bytes (%d) of a text of %d: take out of tokenizer.json what puts text in (Replace, Prepend, ByteLevel, Metaspace)",
		limit, n, (limit-roomBytes)/growth)
}

// checkParts refuses pipelines that could take unlimited time or memory on a text.
func checkParts(what string, parts []part) error {
	if n := len(parts); n > mostParts {
		return status.Errorf(status.Unsupported, "%s has %d parts, at most %d are built: tokenize with the `tokenizers` package beforehand", what, n, mostParts)
	}
	for i, p := range parts {
		for field, text := range map[string]string{"content": p.Content, "prepend": p.Prepend} {
			if len(text) > mostContent {
				return status.Errorf(status.Unsupported, "%s, part %d (%s): %s is %s, at most %d bytes are built: tokenize with the `tokenizers` package beforehand",
					what, i, input.Short(p.Kind), field, input.Quote(text), mostContent)
			}
		}
		for _, pattern := range []*string{p.Pattern.String, p.Pattern.Regex} {
			if pattern != nil && len(*pattern) > mostPattern {
				return status.Errorf(status.Unsupported, "%s, part %d (%s): its pattern is %s, at most %d bytes are built: tokenize with the `tokenizers` package beforehand",
					what, i, input.Short(p.Kind), input.Quote(*pattern), mostPattern)
			}
		}
	}
	return nil
}
