package tokenizer

import "unicode/utf8"

// byteLetters maps each byte to a visible letter: bytes of printable Latin-1 characters to this
// character, the other bytes to the letters from U+0100 on (bytes_to_unicode in encoder.py of
// GPT-2).
var byteLetters = func() (t [256]rune) {
	next := rune(0x100)
	for b := range t {
		if b >= '!' && b <= '~' || b >= 0xA1 && b <= 0xAC || b >= 0xAE {
			t[b] = rune(b)
		} else {
			t[b] = next
			next++
		}
	}
	return t
}()

// letterBytes is the inverse of byteLetters, -1 for letters that stand for no byte.
var letterBytes = func() (t [0x144]int16) {
	for r := range t {
		t[r] = -1
	}
	for b, r := range byteLetters {
		t[r] = int16(b)
	}
	return t
}()

// byteOf returns the byte that a letter stands for, -1 for none.
func byteOf(r rune) rune {
	if r < 0 || int(r) >= len(letterBytes) {
		return -1
	}
	return rune(letterBytes[r])
}

// toByteLevel appends the letters of the bytes of text.
func toByteLevel(dst, text []byte) []byte {
	for _, b := range text {
		dst = utf8.AppendRune(dst, byteLetters[b])
	}
	return dst
}

// fromByteLevel appends the bytes of the letters of s; false if a letter stands for no byte.
func fromByteLevel(dst []byte, s string) ([]byte, bool) {
	for _, r := range s {
		b := byteOf(r)
		if b < 0 {
			return dst, false
		}
		dst = append(dst, byte(b))
	}
	return dst, true
}
