// Package arch has tests that read the sources of the whole repository: which package imports
// which (docs/architecture.md), that comparisons in tests refuse NaN, and how comments, messages
// and pages are written.
package arch

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// may lists the packages of this module that each package may import, in addition to the leaves.
// The test fails for a package that is not listed.
var may = map[string]string{
	"tensor":              "",
	"device":              "tensor",
	"device/generate":     "device tensor",
	"comm":                "device tensor",
	"cpu":                 "cpu/kernels device tensor",
	"cpu/kernels":         "",
	"cuda":                "comm device tensor",
	"sp":                  "comm device tensor",
	"gdn":                 "sp comm device tensor",
	"tile":                "comm device tensor",
	"model":               "tile gdn sp comm device tensor",
	"data":                "data/chat data/chat/jinja data/tokenizer data/unpack comm tensor",
	"data/chat":           "data/chat/jinja",
	"data/chat/jinja":     "",
	"data/unpack":         "",
	"train":               "data model sp comm device tensor checkpoint internal/outdir",
	"job":                 "job/launch job/cluster job/supervise job/report job/file job/operator job/assembly job/plan job/doctor job/generate train data model gdn sp comm device tensor backends internal/outdir internal/tfevents dryrun",
	"job/launch":          "comm tensor",
	"job/supervise":       "",
	"job/report":          "job/file job/assembly job/plan train model gdn comm device tensor",
	"job/plan":            "job/file job/operator job/assembly train data model gdn sp comm device tensor backends dryrun",
	"job/assembly":        "job/file train data model gdn comm device tensor",
	"job/generate":        "model data/chat data/tokenizer comm device tensor",
	"job/doctor":          "job/cluster backends comm",
	"job/cluster":         "comm device tensor internal/outdir",
	"job/operator":        "job/file sp gdn comm device tensor internal/blockmask",
	"job/file":            "data data/chat train model device tensor",
	"cmd/ulysses-mpi":     "job",
	"capi":                "gdn sp tile cuda comm device tensor backends internal/blockmask",
	"capi/generate":       "",
	"benchmarks":          "job model gdn sp comm cpu device tensor backends testkit/slowlinks",
	"backends":            "cpu cuda comm device tensor",
	"dryrun":              "comm device tensor",
	"checkpoint":          "tensor",
	"internal/outdir":     "",
	"data/tokenizer":      "",
	"testkit/ref":         "tensor",
	"testkit/conformance": "testkit/near testkit/ref device tensor",
	"testkit/cudatest":    "",
	"testkit/tensorfile":  "tensor",
	"testkit/mpitest":     "comm",
	"testkit/near":        "",
	"testkit/gathers":     "comm device tensor",
	"testkit/slowlinks":   "comm device tensor",
	"testkit/need":        "",
	"testkit/fake":        "cpu comm device tensor", // in tests alone
	"testkit/devicetest":  "comm device backends testkit/cudatest testkit/fake",
	"internal/notice":     "",
	"internal/arch":       "",
	"internal/status":     "",
	"internal/version":    "",
	"internal/input":      "",
	"internal/notbuilt":   "",
	"internal/blockmask":  "",
	"internal/splitmix":   "",
	"internal/clock":      "",
	"internal/trace":      "",
	"internal/flight":     "",
	"internal/units":      "",
	"internal/tfevents":   "",
	"internal/ownfile":    "",
	"internal/proc":       "",
	"slurm":               "",
}

// leaves are packages that every package may import.
const leaves = " internal/status internal/version internal/input internal/notbuilt internal/clock internal/trace internal/flight internal/units internal/proc internal/ownfile internal/splitmix slurm "

func TestImportsPointDown(t *testing.T) {
	for _, tags := range []string{"", "mpi"} {
		cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "-tags", tags, "ulysses/...")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", cmd, err)
		}
		seen := 0
		for d := json.NewDecoder(strings.NewReader(string(out))); ; seen++ {
			var p struct {
				ImportPath string
				Imports    []string
			}
			if err := d.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			name := strings.TrimPrefix(p.ImportPath, "ulysses/")
			allowed, ok := may[name]
			if !ok {
				t.Errorf("package %s is not listed; add it to may in internal/arch", name)
			}
			for _, i := range p.Imports {
				i, ours := strings.CutPrefix(i, "ulysses/")
				if ours && !strings.Contains(" "+allowed+leaves, " "+i+" ") {
					t.Errorf("%s imports %s, which is not below it; see docs/architecture.md", name, i)
				}
			}
		}
		if seen < len(may)/2 {
			t.Errorf("go list -tags %q printed only %d packages", tags, seen)
		}
	}
}

// docs/architecture.md names every package. It describes the packages in internal and testkit
// together. A package of the first list imports none that stands above it.
func TestPage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(page), "\n## Packages\n")
	list, _, _ = strings.Cut(list, "\n## ")
	position := map[string]int{} // in the first list, from 1
	lists := strings.Split(list, "\n\n    ")
	for _, line := range strings.Split(lists[1], "\n") {
		if name, _, _ := strings.Cut(strings.TrimSpace(line), " "); may[name] != "" {
			position[name] = len(position) + 1
		}
	}
	for name, imports := range may {
		if strings.HasPrefix(name, "internal/") || strings.HasPrefix(name, "testkit/") || name == "slurm" ||
			name == "cpu/kernels" {
			continue
		}
		if !regexp.MustCompile(`(?m)^ {4}` + name + `[ ,]`).MatchString(list) {
			t.Errorf("docs/architecture.md does not list %s", name)
		}
		for _, below := range strings.Fields(imports) {
			if above := position[below]; above > 0 && above < position[name] {
				t.Errorf("docs/architecture.md lists %s above %s, which imports it", below, name)
			}
		}
	}
}
