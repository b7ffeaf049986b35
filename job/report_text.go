package job

import (
	"fmt"
	"slices"
	"strings"
)

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
