package cuda

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/testkit/cudatest"
)

// TestLayout compares the argument structs of C with the structs of Go. It compiles a C program
// that prints the size of each struct and the offset and size of each field, and copies a struct
// field by field: every byte of each Go field must be in the copy.
func TestLayout(t *testing.T) {
	root, err := cudatest.Root()
	if err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	header, err := os.ReadFile(filepath.Join(root, "cuda", "operations.h"))
	if err != nil {
		t.Fatal(err)
	}
	var source, want, input, back bytes.Buffer
	source.WriteString("#include <stddef.h>\n#include <stdio.h>\n#include <string.h>\n#include \"kernels.h\"\nint main(void) {\n")
	for i, o := range device.Operations {
		name, fields := cStruct(t, string(header), i)
		if n := o.Args.NumField(); n != len(fields) {
			t.Fatalf("%s has %d fields, %s %d", o.Args, n, name, len(fields))
		}
		fmt.Fprintf(&source,
			"{ static %s from, to; fprintf(stderr, \"%%zu\\n\", sizeof from); if (fread(&from, sizeof from, 1, stdin) != 1) return 1; memset(&to, 0, sizeof to);\n",
			name)
		fmt.Fprintf(&want, "%d\n", o.Size)
		bits, kept := make([]byte, o.Size), make([]byte, o.Size)
		for j, field := range fields {
			f := o.Args.Field(j)
			fmt.Fprintf(&source,
				"fprintf(stderr, \"%%zu %%zu\\n\", offsetof(%s, %s), sizeof from.%s); to.%s = from.%s;\n", name, field,
				field, field, field)
			fmt.Fprintf(&want, "%d %d\n", f.Offset, f.Type.Size())
			for at := f.Offset; at < f.Offset+f.Type.Size(); at++ {
				if bits[at] = byte(at*7 + uintptr(i) + 1); f.Type.Kind() == reflect.Bool {
					bits[at] = 1
				}
			}
			pad(f.Type, bits[f.Offset:])
			copy(kept[f.Offset:f.Offset+f.Type.Size()], bits[f.Offset:])
		}
		input.Write(bits)
		back.Write(kept)
		source.WriteString("fwrite(&to, sizeof to, 1, stdout); }\n")
	}
	source.WriteString("return 0;\n}\n")
	folder := t.TempDir()
	c, program := filepath.Join(folder, "layout.c"), filepath.Join(folder, "layout")
	if err := os.WriteFile(c, source.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-I", filepath.Join(root, "cuda"), "-o", program,
		c).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	var copied, places bytes.Buffer
	run := exec.Command(program)
	run.Stdin, run.Stdout, run.Stderr = &input, &copied, &places
	if err := run.Run(); err != nil {
		t.Fatal(err)
	}
	if places.String() != want.String() {
		t.Errorf("C has sizes and offsets\n%s\nwant\n%s", places.String(), want.String())
	}
	if !bytes.Equal(copied.Bytes(), back.Bytes()) {
		t.Error("a struct that C copied field by field differs from the struct of Go")
	}
}

// pad clears the bytes of a struct that belong to no field, which a copy may omit, and sets bools
// to 1.
func pad(x reflect.Type, b []byte) {
	if x.Kind() != reflect.Struct {
		return
	}
	end := uintptr(0)
	for i := range x.NumField() {
		f := x.Field(i)
		clear(b[end:f.Offset])
		if end = f.Offset + f.Type.Size(); f.Type.Kind() == reflect.Bool {
			b[f.Offset] = 1
		}
		pad(f.Type, b[f.Offset:])
	}
	clear(b[end:x.Size()])
}

// cStruct returns the name of an operation's arguments in C, and their fields, from the header.
func cStruct(t *testing.T, header string, op int) (name string, fields []string) {
	t.Helper()
	_, list, _ := strings.Cut(header, "#define ULY_OPERATIONS(X)")
	x := strings.Split(list, "X(")[op+1]
	name = strings.TrimSpace(strings.Split(strings.Split(x, ")")[0], ",")[2])
	text, _, ok := strings.Cut(header, "} "+name+";")
	if !ok {
		t.Fatalf("no struct %s", name)
	}
	text = text[strings.LastIndex(text, "typedef struct {")+len("typedef struct {"):]
	for line := range strings.Lines(text) {
		if words := strings.FieldsFunc(line,
			func(r rune) bool { return strings.ContainsRune(" *;\n", r) }); len(words) > 0 {
			fields = append(fields, words[len(words)-1])
		}
	}
	return name, fields
}
