package job

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/cudatest"
)

// freshTree returns a folder with the source files below the paths, as in a fresh clone, without
// build outputs.
func freshTree(t *testing.T, paths ...string) string {
	t.Helper()
	root, err := cudatest.Root()
	if err != nil {
		t.Fatal(err)
	}
	list := exec.Command("git",
		append([]string{"-C", root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--"}, paths...)...)
	out, err := list.Output()
	if err != nil {
		t.Fatalf("%v: %v", list, err)
	}
	tree := t.TempDir()
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(tree, name)), 0o700)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(tree, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return tree
}

// searched is the search of which docs/plan.md shows the first and the last rows.
const searched = "examples/llama-8b.toml --cluster examples/clusters/h200.toml --search"

// compareRows checks that the rows of docs/plan.md are rows that the search printed, in its order.
func compareRows(t *testing.T, printed string) {
	t.Helper()
	page := text(t, "docs/plan.md")
	_, page, _ = strings.Cut(page, "begins and ends with\n")
	rows := regexp.MustCompile(`(?m)^    ((?: +\d+){2} .*)$`).FindAllStringSubmatch(page, -1)
	if len(rows) < 4 {
		t.Fatalf("docs/plan.md shows %d rows of plan %s", len(rows), searched)
	}
	for _, row := range rows {
		_, rest, found := strings.Cut(printed, row[1]+"\n")
		if !found {
			t.Errorf("plan %s does not print this row of docs/plan.md, or not there:\n%s", searched, row[1])
			continue
		}
		printed = rest
	}
}

// Every plan that a page or an example shows can be made in a fresh clone, without a GPU, a
// plug-in, weights or data.
func TestDocumentedPlans(t *testing.T) {
	tree := freshTree(t, "docs", "examples", "README.md")
	t.Setenv("ULYSSES_CUDA_PLUGIN", "")
	t.Chdir(tree)
	shown := regexp.MustCompile(`(?m)^(?:    |#\s+)bin/ulysses-mpi plan ([^#\n]*)`)
	seen := map[string]bool{}
	for _, pattern := range []string{"README.md", "docs/*.md", "examples/*.toml", "examples/clusters/*.toml"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v, %v", pattern, files, err)
		}
		for _, name := range files {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range shown.FindAllStringSubmatch(string(text), -1) {
				args := strings.Join(strings.Fields(m[1]), " ")
				if seen[args] {
					continue
				}
				seen[args] = true
				code, out, errs := call(append([]string{"plan"}, strings.Fields(args)...)...)
				if code != status.OK || errs != "" || !strings.Contains(out, "tokens/s") {
					t.Errorf("%s: plan %s: %v\n%s%s", name, args, code, out, errs)
				}
				if args == searched {
					compareRows(t, out)
				}
			}
		}
	}
	for _, args := range []string{"examples/hybrid.toml", searched} {
		if !seen[args] {
			t.Errorf("no page shows plan %s", args)
		}
	}
	if left, err := filepath.Glob("examples/out*"); err != nil || len(left) > 0 {
		t.Errorf("plans left %v", left)
	}
}

// A plan takes the job's number of ranks, or the number that --ranks sets.
func TestPlanTakesTheRanksOfTheJob(t *testing.T) {
	for args, want := range map[string]string{
		"--set parallel.ulysses=4":      "4 ranks, ulysses 4 x data 1, zero 0, 4 a node",
		"--set parallel.ulysses=4 -n 8": "8 ranks, ulysses 4 x data 2, zero 0, 8 a node",
		"":                              "1 rank, ulysses 1 x data 1, zero 0, 1 a node",
	} {
		code, out, errs := call(append([]string{"plan", planned(t, "llama")}, strings.Fields(args)...)...)
		if code != status.OK || !strings.HasPrefix(out, want) {
			t.Errorf("%s: %v, want %q in\n%s%s", args, code, want, out, errs)
		}
	}
}

// On a machine without the plug-in, a plan for the machine's own GPU fails and names the
// alternative: a described GPU.
func TestPlanForAGPUThatIsNotHere(t *testing.T) {
	t.Setenv("ULYSSES_CUDA_PLUGIN", "")
	path := planned(t, "hybrid")
	if code, _, errs := call("plan", path, "--set", "device.backend=cuda"); code != status.Device ||
		!strings.Contains(errs, "--cluster") {
		t.Errorf("%v %s", code, errs)
	}
	cluster := filepath.Join(t.TempDir(), "c.toml")
	if err := os.WriteFile(cluster, []byte("ranks_per_node = 2\ndevice = \"h100\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, sets := range []string{"device.backend=cuda", "device.backend=auto", "device.dtype=f32"} {
		code, out, errs := call("plan", path, "--set", "device.backend=cuda", "--set", sets, "--cluster", cluster)
		if code != status.OK || !strings.Contains(out, "2 ranks, ulysses 2") || !strings.Contains(out, "NVIDIA H100") ||
			!strings.Contains(out, "working memory") {
			t.Errorf("%s: %v %s%s", sets, code, out, errs)
		}
	}
}
