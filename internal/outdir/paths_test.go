package outdir

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Inside recognises a folder through links, by other names, and if the end of the path does not
// exist yet.
func TestInside(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"base/sub", "baseline"} {
		if err := os.MkdirAll(at(name), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"link": "base", "deep": "base/sub", "chain": "link"} {
		if err := os.Symlink(to, at(link)); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(at("base"))
	for _, x := range []struct {
		path string
		want bool
	}{
		{"base", true}, {"base/sub", true}, {"base/new/model", true}, {"link", true}, {"chain/new", true},
		{"deep", true}, {"deep/x", true}, {"base/../link/.", true},
		{"baseline", false}, {"", false}, {"other/base", false}, {"base/../new", false}, {"basename", false},
	} {
		if got := Inside(at(x.path), at("base")); got != x.want {
			t.Errorf("%s in base: %v", x.path, got)
		}
		if got := Inside(at(x.path), at("chain")); got != x.want {
			t.Errorf("%s in a link to base: %v", x.path, got)
		}
	}
	if !Inside("new", at("base")) || !Inside(".", at("link")) || Inside("../other", at("base")) ||
		Inside("..", at("base")) {
		t.Error("a relative path")
	}
	if !Inside(at("gone/x"), at("gone")) || Inside(at("gone"), at("gone/x")) {
		t.Error("folders that do not exist")
	}
}

// A folder behind a link that leads nowhere is refused with the link and its target.
func TestDanglingLink(t *testing.T) {
	dir := t.TempDir()
	link, target := filepath.Join(dir, "link"), filepath.Join(dir, "nowhere")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, filepath.Join(link, "sub", "run")} {
		_, err := Take(path, Record{Token: "1"}, func(string) {})
		if err == nil ||
			!strings.Contains(err.Error(), link+" is a symbolic link to "+target+", which does not exist") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := os.Mkdir(target, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := mkdirAll(filepath.Join(link, "sub")); err != nil {
		t.Error(err)
	}
}
