package tokenizer

// segment is a range of the text while it is normalized and split. first is the number of its bytes
// that come from the first character of the document, or 0 if the segment does not begin there.
// Metaspace reads it with the scheme "first".
type segment struct {
	text  []byte
	first int
}

// sub returns bytes [start, end) of the segment.
func (p segment) sub(start, end int) segment {
	return segment{p.text[start:end], max(0, min(p.first, end)-start)}
}

// prepended returns the segment with a prefix, which is appended to dst. The prefix counts as bytes
// of the first character.
func (p segment) prepended(dst []byte, prefix string) segment {
	text := append(append(dst, prefix...), p.text...)
	if p.first > 0 {
		p.first += len(prefix)
	}
	return segment{text, p.first}
}
