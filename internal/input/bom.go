package input

import "bytes"

// BOM is the UTF-8 byte order mark. Editors on Windows write it at the start of a file. The mark is
// not part of the text (The Unicode Standard, 23.8).
const BOM = "\ufeff"

// TrimBOM returns the text of a file without a leading byte order mark.
func TrimBOM(file []byte) []byte { return bytes.TrimPrefix(file, []byte(BOM)) }
