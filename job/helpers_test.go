package job

import (
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/testkit/need"
)

// base is the shortest job file of a training job.
const base = "[model]\nnew = { model_type = \"llama\", vocab_size = 9, hidden_size = 8, intermediate_size = 8, num_hidden_layers = 1, num_attention_heads = 1 }\n[data]\npath = [\"a.txt\"]\n"

// parse parses the text of a job file in the folder jobs/.
func parse(src string, sets ...string) (*file.Job, error) {
	return file.Parse([]byte(src), "jobs/job.toml", sets, nil)
}

// expectFault checks the code of an error and the words that it must contain.
func expectFault(t *testing.T, err error, code status.Code, want []string) {
	t.Helper()
	if status.Of(err) != code {
		t.Errorf("%v: code %v, want %v", err, status.Of(err), code)
	}
	for _, w := range want {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("%v: want it to say %q", err, w)
		}
	}
}

// needsMounts skips a test that cannot mount a small disk, and fails it in CI.
func needsMounts(t *testing.T, err error) {
	t.Helper()
	need.Missing(t, "no small disk can be mounted: "+err.Error(),
		"run the tests as root, in a container started with --privileged")
}
