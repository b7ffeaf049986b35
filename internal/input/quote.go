package input

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// most is the number of bytes of a name that a message shows.
const most = 100

// Quote returns a text from a file in quotes. It shortens a long text to its first bytes and the
// number of bytes.
func Quote(s string) string {
	head, rest := cut(s)
	return strconv.Quote(head) + rest
}

// Short returns a text from a file without quotes. It shortens a long text to its first bytes and
// the number of bytes.
func Short(s string) string {
	head, rest := cut(s)
	return head + rest
}

// longWord is the longest word, in bytes, that a message shows whole. Paths may be this long.
const longWord = 1000

// Words returns a message in which each word longer than longWord is shortened to its first bytes
// and the number of bytes.
func Words(message string) string {
	if len(message) <= longWord {
		return message
	}
	var b strings.Builder
	for len(message) > 0 {
		n := strings.IndexAny(message, " \t\n")
		if n < 0 {
			n = len(message)
		}
		if n > longWord {
			b.WriteString(Short(message[:n]))
		} else {
			b.WriteString(message[:n])
		}
		if message = message[n:]; message != "" {
			b.WriteByte(message[0])
			message = message[1:]
		}
	}
	return b.String()
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
