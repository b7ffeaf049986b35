// Command notice prints the licenses of everything that the program, the libraries and the wheel
// contain beside this project's own code: the Go modules that they link, Go's runtime, and the
// files of other projects in the repository. `make notice` writes its output to NOTICE.
package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const head = `This product contains software of other projects. Each section below names one, says where it is
used, and quotes its license. The license of this product itself is in the file LICENSE.

This file is generated: make notice
`

// The texts of licenses that are in no file of the repository or of the module cache.
var (
	//go:embed go-license.txt
	goLicense []byte
	//go:embed cudnn-frontend-license.txt
	frontendLicense []byte
)

// legal matches the names of files that may contain a module's license.
var legal = regexp.MustCompile(`^(LICEN[CS]E|COPYING|NOTICE|PATENTS)(\.txt|\.md)?$`)

func main() {
	text, err := notice(".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "notice:", err)
		os.Exit(1)
	}
	os.Stdout.Write(text)
}

// notice returns the text for the sources in a folder.
func notice(root string) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString(head)
	section := func(name, use string, license []byte) {
		fmt.Fprintf(&b, "\n%s\n%s\n%s\n\n%s\n", strings.Repeat("=", 80), name, use, bytes.TrimSpace(license))
	}
	section("The Go runtime and standard library", "Linked into the program and the library.", goLicense)
	list := exec.Command("go", "list", "-deps", "-tags", "mpi", "-f",
		"{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}", "./cmd/ulysses-mpi", "./capi")
	list.Dir, list.Stderr = root, os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("%v: %w", list, err)
	}
	modules := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(modules)
	for _, m := range slices.Compact(modules) {
		fields := strings.Fields(m)
		if len(fields) != 3 {
			return nil, fmt.Errorf("go list printed %q: a path, a version and a folder are needed", m)
		}
		license, err := licenseOf(fields[2])
		if err != nil {
			return nil, err
		}
		section(fields[0]+" "+fields[1], "Linked into the program or the library.", license)
	}
	uplot, err := os.ReadFile(filepath.Join(root, "job", "report", "uplot", "LICENSE"))
	if err != nil {
		return nil, err
	}
	section("uPlot", "Part of the reports that the program writes.", uplot)
	section("NVIDIA cudnn-frontend", "Compiled into the CUDA plug-in, where the package contains it.", frontendLicense)
	return b.Bytes(), nil
}

// licenseOf returns the license files of a folder, one after the other.
func licenseOf(folder string) ([]byte, error) {
	files, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	var all [][]byte
	for _, f := range files {
		if legal.MatchString(f.Name()) {
			text, err := os.ReadFile(filepath.Join(folder, f.Name()))
			if err != nil {
				return nil, err
			}
			all = append(all, bytes.TrimSpace(text))
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no license file", folder)
	}
	return bytes.Join(all, []byte("\n\n")), nil
}
