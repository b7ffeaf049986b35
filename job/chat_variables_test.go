package job

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Variables of the chat template change the texts that are trained, by the job file and by --set. A
// resumed run must have the same.
func TestChatVariables(t *testing.T) {
	folder := t.TempDir()
	record := `{"messages": [{"role": "user", "content": "How warm is it?"}, {"role": "assistant", "content": "It is 20 degrees."}]}` +
		"\n"
	put(t, filepath.Join(folder, "a.jsonl"), strings.Repeat(record, 40))
	put(t, filepath.Join(folder, "t.jinja"),
		"{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}{{ mode | default('none') }}{{ level }}")
	sets := []string{"data.path=" + filepath.Join(folder, "a.jsonl"), "data.chat_template=" +
		filepath.Join(folder, "t.jinja")}
	loss := func(text string, sets ...string) (string, []float64, func(...string) error) {
		dir, run := newKept(t, sets...)
		put(t, filepath.Join(dir, "job.toml"), kept+text)
		if _, err := run(2); err != nil {
			t.Fatal(err)
		}
		return dir, losses(t, dir), func(sets ...string) error { _, err := run(2, sets...); return err }
	}
	_, none, _ := loss("", sets...)
	dir, table, run := loss("[data.chat_variables]\nmode = \"a\"\nlevel = 2\n", sets...)
	_, args, _ := loss("", append(sets, "data.chat_variables.mode=a", "data.chat_variables.level=2")...)
	if slices.Equal(none, table) || !slices.Equal(table, args) {
		t.Errorf("losses %v, with variables %v, by --set %v", none, table, args)
	}
	expectFault(t, run("data.chat_variables.level=2.0"), status.InvalidConfig,
		[]string{"is of another run", "conversations"})
	expectFault(t, run("data.chat_variables={}"), status.InvalidConfig, []string{"is of another run", "conversations"})
	expectFault(t, run("data.chat_variables.levle=2"), status.InvalidConfig,
		[]string{"data.chat_variables.levle: ", "t.jinja does not read it"})
	if err := run(); err != nil {
		t.Error(err)
	}
	report, err := os.ReadFile(filepath.Join(dir, "out", "report.html"))
	if err != nil || !strings.Contains(string(report), "[data.chat_variables]") {
		t.Errorf("%v, or the report does not show the variables", err)
	}
}
