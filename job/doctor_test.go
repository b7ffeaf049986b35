package job

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/cudatest"
)

// runDoctor returns the output of doctor, with runs of spaces replaced by one.
func runDoctor(t *testing.T) string {
	t.Helper()
	code, out, errs := call("doctor")
	if code != status.OK || errs != "" {
		t.Fatal(code, errs)
	}
	return regexp.MustCompile(` +`).ReplaceAllString(out, " ")
}

func wants(t *testing.T, out string, wants ...string) {
	t.Helper()
	for _, w := range wants {
		if !strings.Contains(out, w) {
			t.Errorf("no %q in\n%s", w, out)
		}
	}
}

func TestDoctorWithoutPlugin(t *testing.T) {
	t.Setenv("ULYSSES_CUDA_PLUGIN", "")
	wants(t, runDoctor(t), " CUDA plug-in none", "\n CUDA plug-in: jobs run on the CPU", "make cuda", "\n GPUs ",
		"\n NCCL unknown")
	path := filepath.Join(t.TempDir(), "broken.so")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("ULYSSES_CUDA_PLUGIN", path)
	wants(t, runDoctor(t), " CUDA plug-in cannot be used", path, `"auto" is refused`)
}

// If the plug-in was built and the program does not find it, doctor prints how to set its path
// instead of advising make cuda again.
func TestDoctorFindsABuiltPlugin(t *testing.T) {
	t.Setenv("ULYSSES_CUDA_PLUGIN", "")
	t.Chdir(t.TempDir())
	if err := os.MkdirAll("build/cuda", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("build/cuda/libulysses_cuda.so", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	out := runDoctor(t)
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	wants(t, out, " CUDA plug-in not found, though "+here+"/build/cuda/libulysses_cuda.so is built",
		"set ULYSSES_CUDA_PLUGIN="+here+"/build/cuda/libulysses_cuda.so")
	if strings.Contains(out, "make cuda") {
		t.Errorf("doctor advises what has been done:\n%s", out)
	}
}

// Doctor names the plug-in, every GPU that opens and every library, with the consequence of each
// missing library.
func TestDoctorOnGPUs(t *testing.T) {
	path := cudatest.Use(t)
	out := runDoctor(t)
	wants(t, out, " CUDA plug-in "+path, "\n GPU 0 ")
	if !regexp.MustCompile(`\n GPU 0 .*, [0-9.]+ GiB free of [0-9.]+ GiB \(.+\)\n`).MatchString(out) {
		t.Errorf("no memory and kernels of GPU 0 in\n%s", out)
	}
	for _, library := range []string{"cuBLASLt", "cuDNN", "NVRTC", "NCCL"} {
		wants(t, out, "\n "+library+" ")
		if regexp.MustCompile("\n "+library+" (not|needs) ").MatchString(out) &&
			!regexp.MustCompile(`\n `+library+`: .+\n .+\n`).MatchString(out) {
			t.Errorf("%s is missing without its costs and fix in\n%s", library, out)
		}
	}
	t.Setenv("ULYSSES_EMULATED_DEVICES", "0") // a real GPU stays
	if strings.Contains(path, "emulated") {
		wants(t, runDoctor(t), " GPUs none", "\n GPUs: jobs run on the CPU", "no GPU is visible")
	}
}

// With --cluster, doctor checks the ranks of a job and makes no output.dir. Files that are missing
// are findings, and a faulty job file is an error.
func TestDoctorOfAJob(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "job.toml")
	text := "[model.new]\nmodel_type = \"qwen3\"\nhidden_size = 64\nintermediate_size = 128\nnum_hidden_layers = 2\nnum_attention_heads = 4\nnum_key_value_heads = 2\nvocab_size = 256\n" +
		"[data]\nsequence = 64\n[optimizer]\nlr = 1e-3\n[train]\nsteps = 2\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"doctor", "--cluster", path, "--ranks", "3", "--set", "output.dir=" + filepath.Join(dir, "out")}
	if code, out, errs := call(args...); code != status.InvalidConfig || out != "" ||
		!strings.Contains(errs, "data.path: missing") {
		t.Errorf("%v: %s%s", code, out, errs)
	}
	args = append(args, "--set", "data.path="+filepath.Join(dir, "text.txt"), "--set", "device.backend=cpu")
	code, out, errs := call(args...)
	if want := "\ndata.path: ranks 0, 1, 2 on "; code != status.IO || errs != "" || !strings.Contains(out, want) ||
		!strings.Contains(out, "text.txt: no such file") {
		t.Errorf("%v, not %q: %s%s", code, want, out, errs)
	}
	if err := os.WriteFile(filepath.Join(dir, "text.txt"), []byte("the cat sat on the mat"), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs = call(args...)
	if rest := regexp.MustCompile(`(?m)^slow (device|link): .*\n\n`).ReplaceAllString(out, ""); errs != "" ||
		strings.Count(rest, "\n\n") != 1 || len(rest) == len(out) && code != status.OK {
		t.Errorf("%v: %s%s", code, out, errs)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("left behind: %v", entries)
	}
}

// For an operator job, doctor checks the folder of its output file, which the run does not create.
func TestDoctorOfAnOperatorJob(t *testing.T) {
	path := filepath.Join(t.TempDir(), "job.toml")
	text := "kind = \"gdn\"\n[gdn]\ninput = \"in.safetensors\"\noutput = \"none/out.safetensors\"\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs := call("doctor", "--cluster", path)
	if code != status.IO || !strings.Contains(out, "gdn.output: rank 0 on ") ||
		!strings.Contains(out, "cannot write into it: ") || !strings.Contains(out, "2 findings") {
		t.Errorf("%v: %s%s", code, out, errs)
	}
}
