// Package bom takes the byte order mark from the head of a UTF-8 file. Editors of Windows write it;
// it says how the text is stored and is no part of it (The Unicode Standard 23.8), so that files of
// text are read alike with and without it.
package bom

import "bytes"

// Mark is the mark in UTF-8.
const Mark = "\ufeff"

// Trim is the text of a file without its mark.
func Trim(file []byte) []byte { return bytes.TrimPrefix(file, []byte(Mark)) }
