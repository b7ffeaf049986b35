package input

import (
	"fmt"
	"strconv"
	"strings"
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

// longWord is the bytes of a word in a message that is shown whole: a path may be so long.
const longWord = 1000

// Words is a message without words that are longer than any name should be: of these it has the beginning, and the number of bytes.
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
