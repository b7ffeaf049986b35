package input

import (
	"fmt"
	"strconv"
	"unicode/utf8"
)

// most is the bytes of a name that a message shows.
const most = 100

// Quote is a text from a file in quotes; of a long one it is the beginning, and the number of bytes.
func Quote(s string) string {
	head, rest := cut(s)
	return strconv.Quote(head) + rest
}

// Short is a text from a file as it stands; of a long one it is the beginning, and the number of bytes.
func Short(s string) string {
	head, rest := cut(s)
	return head + rest
}

func cut(s string) (head, rest string) {
	if len(s) <= most {
		return s, ""
	}
	n := most
	for n > most-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n], fmt.Sprintf("… (%d bytes)", len(s))
}
