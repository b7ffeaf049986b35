// Package units formats numbers for people: counts, bytes, times and rates with their units, for
// tables, log lines and reports.
package units

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Grouped formats a whole number with narrow spaces between groups of three digits.
func Grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for at := len(s) - 3; at > 0 && s[at-1] != '-'; at -= 3 {
		s = s[:at] + "\u202f" + s[at:]
	}
	return s
}

// Count formats a number with its noun: 1 rank, 2 ranks.
func Count[N int | int64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Bytes formats a number of bytes with a binary unit: 12 B, 1.5 GiB.
func Bytes(n int64) string {
	x := float64(n)
	for _, u := range []string{"B", "KiB", "MiB", "GiB"} {
		if math.Abs(x) < 1024 {
			if u == "B" {
				return fmt.Sprintf("%d B", n)
			}
			return fmt.Sprintf("%.1f %s", x, u)
		}
		x /= 1024
	}
	return fmt.Sprintf("%.1f TiB", x)
}

// Spaced formats a number with three significant digits and a space, to which a unit can be
// appended: 8.35 G.
func Spaced(x float64) string {
	text := Short(x)
	if digits := strings.TrimRight(text, "kMGTP"); digits != text {
		return digits + " " + text[len(digits):]
	}
	return text + " "
}

// Seconds formats seconds without a unit: three decimals, or one from 1000 s on.
func Seconds(x float64) string {
	if x >= 1000 {
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.3f", x)
}

// Number formats a loss or a similar value with four decimals, or with three significant digits
// from 1e5 on.
func Number(x float64) string {
	switch {
	case math.IsNaN(x):
		return "NaN"
	case math.Abs(x) >= 1e5:
		return fmt.Sprintf("%.3g", x)
	}
	return fmt.Sprintf("%.4f", x)
}

// Duration formats seconds as 2h3m4s, and from 100 years on, which a time.Duration may not hold, as
// years.
func Duration(seconds float64) string {
	const year = 365.25 * 24 * 60 * 60
	if seconds >= 100*year {
		return Short(seconds/year) + " years"
	}
	return (time.Duration(seconds * float64(time.Second))).Round(time.Second).String()
}

// Short formats a number with three significant digits and a unit prefix.
func Short(x float64) string {
	for _, u := range []string{"", "k", "M", "G", "T"} {
		if math.Abs(x) < 999.5 {
			return fmt.Sprintf("%.3g%s", x, u)
		}
		x /= 1000
	}
	return fmt.Sprintf("%.3gP", x)
}

// FromGiB returns a number of GiB in bytes, at most the largest int64.
func FromGiB(n float64) int64 {
	if n *= 1 << 30; n < math.MaxInt64 {
		return int64(n)
	}
	return math.MaxInt64
}

// MiB converts bytes to MiB.
func MiB(n int64) float64 { return float64(n) / (1 << 20) }

// Elapsed formats a time with tenths of a second below a minute, otherwise with whole seconds.
func Elapsed(d time.Duration) string {
	if d < time.Minute {
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return d.Round(time.Second).String()
}

// GiB formats bytes in GiB with one decimal.
func GiB(bytes int64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }
