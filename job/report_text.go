package job

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// groups writes a whole number with thin spaces between thousands.
func groups(n int64) string {
	s := strconv.FormatInt(n, 10)
	for at := len(s) - 3; at > 0 && s[at-1] != '-'; at -= 3 {
		s = s[:at] + "\u202f" + s[at:]
	}
	return s
}

// plural formats a number with its noun: 1 rank, 2 ranks.
func plural[N int | int64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// size writes bytes with a unit.
func size(n int64) string {
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

// spaced formats a number with three significant digits and a space, to which a unit can be
// appended: 8.35 G.
func spaced(x float64) string {
	text := short(x)
	if digits := strings.TrimRight(text, "kMGTP"); digits != text {
		return digits + " " + text[len(digits):]
	}
	return text + " "
}

// seconds writes a time with three digits behind the point, or one where it is long.
func seconds(x float64) string {
	if x >= 1000 {
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.3f", x)
}

// number writes a loss and the like.
func number(x float64) string {
	switch {
	case math.IsNaN(x):
		return "no number"
	case math.Abs(x) >= 1e5:
		return fmt.Sprintf("%.3g", x)
	}
	return fmt.Sprintf("%.4f", x)
}

// distinct is what the ranks have, once if all have the same.
func distinct(facts []rankFacts, of func(rankFacts) string) string {
	var all []string
	for _, f := range facts {
		if x := of(f); !slices.Contains(all, x) {
			all = append(all, x)
		}
	}
	return strings.Join(all, ", ")
}

// hosts is which ranks are where.
func hosts(facts []rankFacts) string {
	var parts []string
	for lo := 0; lo < len(facts); {
		hi := lo
		for hi < len(facts) && facts[hi].Host == facts[lo].Host {
			hi++
		}
		switch {
		case hi == lo+1:
			parts = append(parts, fmt.Sprintf("%s: rank %d", facts[lo].Host, lo))
		default:
			parts = append(parts, fmt.Sprintf("%s: ranks %d to %d", facts[lo].Host, lo, hi-1))
		}
		lo = hi
	}
	return strings.Join(parts, "; ")
}
