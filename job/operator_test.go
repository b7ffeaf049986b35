package job

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/tensorfile"
)

// A run with NaN or Inf prints the path of the output. Verify, which keeps no output, prints no
// path.
func TestUnfiniteJob(t *testing.T) {
	shapes := map[string][]int64{"q": {7, 2, 4}, "k": {7, 2, 4}, "v": {7, 2, 4}}
	in := tensorfile.Filled(t, shapes, map[string]float32{"q": 1e30, "k": 1e30, "v": 1}, nil)
	dir := t.TempDir()
	out := filepath.Join(dir, "out.safetensors")
	for _, dtype := range []string{"f32", "bf16"} {
		for _, verb := range []string{"run", "verify"} {
			put(t, filepath.Join(dir, "job.toml"),
				fmt.Sprintf(
					"kind = \"attention\"\ndevice = {backend = \"cpu\", dtype = %q}\nattention = {input = %q, output = %q}\n",
					dtype, in, out))
			var stdout, stderr bytes.Buffer
			code := Main([]string{verb, filepath.Join(dir, "job.toml"), "--ranks", "3"}, &stdout, &stderr)
			if n := strings.Count(stderr.String(), "out[0, 0, 0]"); code != status.Numeric || n != 1 {
				t.Errorf("%s in %s: %v, named %d times: %s", verb, dtype, code, n, stderr.String())
			}
			ran := verb == "run"
			if strings.Contains(stderr.String(), out+" has all results") != ran ||
				strings.Contains(stdout.String(), ": equal") != ran {
				t.Errorf("%s: %s%s", verb, stdout.String(), stderr.String())
			}
			if files, _ := filepath.Glob(filepath.Join(dir, "*out*")); ran != (len(files) == 1 && files[0] == out) {
				t.Errorf("%s leaves %v", verb, files)
			}
			if files, _ := filepath.Glob(filepath.Join(dir, ".*")); len(files) > 0 {
				t.Errorf("%s leaves %v", verb, files)
			}
			os.Remove(out)
		}
	}
}
