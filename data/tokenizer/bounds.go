package tokenizer

import (
	"ulysses/internal/status"
)

// Limits on a tokenizer.json. Published files are far below them: a pipeline has about ten
// components, a prefix about six bytes, a pattern about 500 characters. Without limits, a file of a
// few lines could use unlimited memory: forty Replaces of "e" by "ee" make 2^40 bytes of one.
const (
	maxComponents = 32 // of a normalizer, pre-tokenizer or decoder, with the members of Sequences
	// bytes of the text that Replace and Prepend insert, of a prefix or suffix of the model, of an
	// added token
	maxContent = 1 << 10
	maxPattern = 1 << 14 // bytes of a pattern
	maxAdded   = 1 << 20 // bytes of all added tokens together
	// A text may grow to growth times its size and minLimit bytes more. NFKC and NFKD make up to 11
	// bytes of one, ByteLevel makes two.
	growth   = 32
	minLimit = 4096
	// The patterns may take stepsPerByte steps for each byte of a text, and minSteps more.
	// Published tokenizers take at most 14 steps for each byte.
	stepsPerByte = 512
	minSteps     = 1 << 20
)

// maxSteps returns the number of steps that all patterns together may take on a text of the given
// bytes.
func maxSteps(text int) int64 { return stepsPerByte*int64(text) + minSteps }

// tooSlow returns the error for a pattern that backtracks too often: (a+)+b takes 2^n steps on n
// letters a.
func tooSlow(text int) error {
	return status.Errorf(status.Unsupported,
		"tokenizer: the patterns take more than %d steps on a text of %d bytes; replace the pattern in tokenizer.json that repeats a repetition, such as (a+)+",
		maxSteps(text), text)
}

// maxBytes returns the largest size to which a text of the given bytes may grow.
func maxBytes(text int) int { return growth*text + minLimit }

// tooLong returns the error for a text that grew beyond its limit.
func tooLong(n, limit int) error {
	return status.Errorf(status.Unsupported,
		"tokenizer: the normalizers and pre-tokenizers make more than %d bytes (%d) of a text of %d; remove components from tokenizer.json that insert text (Replace, Prepend, ByteLevel, Metaspace)",
		limit, n, (limit-minLimit)/growth)
}
