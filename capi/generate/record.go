package main

import (
	"fmt"
	"slices"
	"strings"
)

// record returns a C file that includes ulysses.h. It compiles only if the header has all
// constants, structs and functions that it has now, with the same offsets and types of members. A
// later header may have more members at the end of structs, and more constants and functions.
func (h *header) record() string {
	var b strings.Builder
	fmt.Fprintf(&b, `/* The ABI of ulysses.h %d, printed by capi/generate -record. A header that changes any of it
 * does not compile here. */
#include <stddef.h>
#include "ulysses.h"

#define SAME(what) _Static_assert(what, #what)
`, h.version)
	for _, d := range h.decls {
		b.WriteString("\n")
		for _, c := range d.enum {
			fmt.Fprintf(&b, "SAME(%s == %s);\n", c.name, c.value)
		}
		switch {
		case d.callback != nil:
			fmt.Fprintf(&b, "SAME(_Generic((%s)0, %s: 1, default: 0));\n", d.callback.name, d.callback.spell("(*)"))
		case d.function != nil:
			fmt.Fprintf(&b, "%s;\n", d.function.spell(d.function.name))
		case d.structure != nil:
			h.recordStruct(&b, d.structure)
		}
	}
	return b.String()
}

// recordStruct writes assertions of the offset and type of each member, and of the least size.
func (h *header) recordStruct(b *strings.Builder, s *structure) {
	offset := 0
	for _, f := range s.fields {
		n, align := h.size(f.ctype)
		offset = (offset + align - 1) / align * align
		fmt.Fprintf(b, "SAME(offsetof(%s, %s) == %d);\n", s.name, f.name, offset)
		member := fmt.Sprintf("((%s *)0)->%s", s.name, f.name)
		switch {
		case f.array > 0:
			fmt.Fprintf(b, "SAME(sizeof(%s) == %d);\n", member, n)
		case f.function != nil:
			fmt.Fprintf(b, "SAME(_Generic(%s, %s: 1, default: 0));\n", member, f.function.spell("(*)"))
		default:
			fmt.Fprintf(b, "SAME(_Generic(%s, %s: 1, default: 0));\n", member, f.ctype.spell())
		}
		offset += n
	}
	fmt.Fprintf(b, "SAME(sizeof(%s) >= %d);\n", s.name, offset)
}

// size returns the bytes and the alignment of a member on a machine with 64-bit pointers.
func (h *header) size(t ctype) (n, align int) {
	n = 8
	if len(t.stars) == 0 && t.function == nil && !h.callback[t.base] && !slices.Contains(h.opaque, t.base) {
		n = plain[t.base]
	}
	return n * max(1, t.array), n
}

// spell returns a type in C.
func (t ctype) spell() string {
	s := t.base
	if t.constant {
		s = "const " + s
	}
	for i, constant := range t.stars {
		if i == 0 {
			s += " "
		}
		s += "*"
		if constant {
			s += "const "
		}
	}
	return strings.TrimSuffix(s, " ")
}

// spell returns the prototype of a function in C. The name "(*)" gives the type of a pointer to it.
func (f *function) spell(name string) string {
	params := []string{"void"}
	if len(f.params) > 0 {
		params = nil
		for _, p := range f.params {
			params = append(params, p.ctype.spell())
		}
	}
	return f.result.spell() + " " + name + "(" + strings.Join(params, ", ") + ")"
}
