// Command generate reads capi/ulysses.h and writes the files that repeat its declarations:
// capi/structs.go has the structs with Go's types, and python/ulysses/_struct.py the structs,
// constants and functions for ctypes.
//
//	go run ./capi/generate           write both files (make generate)
//	go run ./capi/generate -check    fail if a file is not current (make check-abi)
//	go run ./capi/generate -record   print a C file that compiles only against headers of this ABI
//
// It runs in the root of the repository. -header names another header.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
)

func main() {
	path := flag.String("header", "capi/ulysses.h", "the header to read")
	check := flag.Bool("check", false, "write no file; exit with 1 if a file is not current")
	record := flag.Bool("record", false, "print the ABI as a C file of assertions")
	flag.Parse()
	if err := run(*path, *check, *record); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run(path string, check, record bool) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	h, err := parse(string(text))
	if err != nil {
		return fmt.Errorf("%s:%w", path, err)
	}
	if record {
		_, err := os.Stdout.WriteString(h.record())
		return err
	}
	for _, out := range []struct {
		path  string
		write func() ([]byte, error)
	}{{"capi/structs.go", h.golang}, {"python/ulysses/_struct.py", h.python}} {
		want, err := out.write()
		if err != nil {
			return fmt.Errorf("%s: %w", out.path, err)
		}
		if !check {
			if err := os.WriteFile(out.path, want, 0o666); err != nil {
				return err
			}
			continue
		}
		if have, err := os.ReadFile(out.path); err != nil {
			return err
		} else if !bytes.Equal(have, want) {
			return fmt.Errorf("%s is not current with %s; run make generate", out.path, path)
		}
	}
	return nil
}
