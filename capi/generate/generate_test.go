package main

import (
	"os"
	"strings"
	"testing"
)

const prefix = "#define ULYSSES_VERSION 203u\ntypedef int32_t ulysses_status;\n"

// A construct that parse does not know is an error that names the line and the text.
func TestUnknownConstructs(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"typedef int32_t ulysses_status;", "no #define ULYSSES_VERSION"},
		{prefix + "#define OTHER 1\n", "3: unknown directive #define OTHER 1"},
		{prefix + "enum { ULYSSES_A, };", `3: found ",", want "="`},
		{prefix + "enum { OTHER = 1 };", `found "OTHER", want a constant ULYSSES_...`},
		{prefix + "enum { ULYSSES_A = 1 + 2 };", `3: unknown text + 2 };`},
		{prefix + "typedef struct { int32_t a : 4; } ulysses_x;", "unknown text : 4"},
		{prefix + "typedef struct { long a; } ulysses_x;", `found "long", want a type`},
		{prefix + "typedef struct { union { int32_t a; } b; } ulysses_x;", `found "union"`},
		{prefix + "typedef struct { int32_t a", "want"},
		{prefix + "typedef uint32_t ulysses_y;", `want typedef int32_t ulysses_status`},
		{prefix + "\nint32_t ulysses_f(int32_t, ...);", `4: unknown text ...);`},
		{prefix + "int32_t ulysses_f(ulysses_missing *);", `found "ulysses_missing", want a type`},
		{prefix + "extern int32_t ulysses_x;", `found "extern"`},
	} {
		if _, err := parse(c.text); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.text, err, c.want)
		}
	}
}

// Each construct of a small header appears in the three outputs.
func TestSmallHeader(t *testing.T) {
	h, err := parse(prefix + `/* a comment
 * of two lines */
#ifdef __cplusplus
extern "C" {
#endif
enum { ULYSSES_OK = 0, ULYSSES_WRONG = 0x10, };
typedef struct ulysses_thing ulysses_thing;
typedef struct { uint32_t struct_size; int32_t a, *b, c[2]; void *user; void (*log)(void *user, const char *); } ulysses_gdn_args;
static inline int32_t ulysses_inline(int32_t x) { return x < 3 ? x >> 1 : -x; }
typedef ulysses_status (*ulysses_call)(void *, const ulysses_gdn_args *const *);
ulysses_status ulysses_f(ulysses_thing *, const ulysses_gdn_args *args, ulysses_call, ulysses_thing **out);
void ulysses_g(void);
`)
	if err != nil {
		t.Fatal(err)
	}
	golang, err := h.golang()
	if err != nil {
		t.Fatal(err)
	}
	python, err := h.python()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ out, want string }{
		{string(golang),
			"	cGDNArgs struct {\n		struct_size uint32\n		a           int32\n		b           *int32\n		c           [2]int32\n		user        uintptr\n		log         unsafe.Pointer\n	}"},
		{string(python), "VERSION = 203  #"},
		{string(python), "    WRONG = 0x10\n"},
		{string(python), "Log = CFUNCTYPE(None, c_void_p, c_char_p)\n"},
		{string(python),
			"        (\"b\", POINTER(c_int32)),\n        (\"c\", c_int32 * 2),\n        (\"user\", c_void_p),\n        (\"log\", Log),\n"},
		{string(python), "Call = CFUNCTYPE(c_int32, c_void_p, POINTER(POINTER(GDNArgs)))\n"},
		{string(python),
			"    \"ulysses_f\": (c_int32, [c_void_p, POINTER(GDNArgs), Call, POINTER(c_void_p)]),\n    \"ulysses_g\": (None, []),\n"},
		{h.record(), "SAME(offsetof(ulysses_gdn_args, b) == 8);\n"},
		{h.record(), "SAME(offsetof(ulysses_gdn_args, log) == 32);\n"},
		{h.record(), "SAME(sizeof(ulysses_gdn_args) >= 40);\n"},
		{h.record(), "ulysses_status ulysses_f(ulysses_thing *, const ulysses_gdn_args *, ulysses_call, ulysses_thing **);\n"},
	} {
		if !strings.Contains(c.out, c.want) {
			t.Errorf("%q is not in the output:\n%s", c.want, c.out)
		}
	}
}

// The generated files in the repository are current.
func TestCurrent(t *testing.T) {
	if err := os.Chdir("../.."); err != nil {
		t.Fatal(err)
	}
	if err := run("capi/ulysses.h", true, false); err != nil {
		t.Error(err)
	}
}
