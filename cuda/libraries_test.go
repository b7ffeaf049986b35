package cuda

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"ulysses/testkit/need"
)

// nvidia is the folder to which make cuda-libs writes NVIDIA's libraries.
func nvidia(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(cache, "ulysses", "cuda13")
	if runtime.GOARCH == "arm64" { // plugin.mk
		folder += "-aarch64"
	}
	if f := os.Getenv("CUDA_DIR"); f != "" {
		folder = f
	}
	folder = filepath.Join(folder, "nvidia")
	need.File(t, filepath.Join(folder, "cudnn", "lib", "libcudnn.so.9"), "run make cuda-libs")
	return folder
}

// installed reports whether the system's loader, or CUDA's usual folder, has libraries of NVIDIA.
// They are then found without settings.
func installed() bool {
	known, _ := exec.Command("/sbin/ldconfig", "-p").Output()
	_, err := os.Stat("/usr/local/cuda/lib64/libcublasLt.so.13")
	return err == nil || strings.Contains(string(known), "libcublasLt.so.13") ||
		strings.Contains(string(known), "libnccl.so.2")
}

// TestLibraries: the plug-in finds libraries by its settings, and reports for the others the effect
// and a fix. Each case is a process, because a process looks for libraries once.
func TestLibraries(t *testing.T) {
	needBuilt(t)
	const child = "ULYSSES_TEST_LIBRARIES"
	if os.Getenv(child) != "" {
		found, err := Probe()
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range found.Libraries {
			fmt.Printf("%s: %s|%s|%s\n", l.Name, l.Found, l.Effect, l.Fix)
		}
		return
	}
	root := nvidia(t)
	plugin, err := filepath.Abs(built)
	if err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(t.TempDir(), "libcudnn.so.9")
	if err := os.WriteFile(text, []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	incomplete := needing(t)
	old, host := cudnnStub(t, "91002"), cudnnStub(t, "91901")
	cases := []struct {
		name string
		env  []string
		want map[string][]string
	}{
		{"no library", nil, map[string][]string{
			"cuBLASLt": {"not found: libcublasLt.so.13, /usr/local/cuda", "many times slower",
				"pip install nvidia-cublas==", "ULYSSES_NVIDIA_ROOT"},
			"cuDNN": {"needs libnvrtc.so.13, which is missing", "attention", "pip install nvidia-cudnn-cu13=="},
			"NCCL":  {"not found: libnccl.so.2", "CUDA IPC", "pip install nvidia-nccl-cu13=="},
		}},
		{"a root", []string{"ULYSSES_NVIDIA_ROOT=" + root}, map[string][]string{
			"cuBLASLt": {"13.1.0, " + root}, "cuDNN": {"9.19.0, " + root}, "NVRTC": {"13.0, " + root},
		}},
		{"a file that is not a library", []string{"ULYSSES_NVIDIA_ROOT=" + root, "ULYSSES_CUDNN_LIB=" + text},
			map[string][]string{
				"cuBLASLt": {"13.1.0"}, "cuDNN": {text, "file too short", "ULYSSES_CUDNN_LIB"},
			}},
		{"a file that needs a missing library", []string{"ULYSSES_NCCL_LIB=" + incomplete},
			map[string][]string{"NCCL": {"NCCL: " + incomplete + ": libabsent.so: ", "No such file"}}},
		{"a version that is too old", []string{"ULYSSES_NVIDIA_ROOT=" + root, "ULYSSES_CUDNN_LIB=" + old},
			map[string][]string{
				"cuDNN": {old + " is 9.10.2: 9.18.0 or newer is needed", "attention",
					"pip install nvidia-cudnn-cu13=="},
			}},
		{"the library of a host program", []string{"ULYSSES_NVIDIA_ROOT=" + root, "LD_PRELOAD=" + host},
			map[string][]string{
				"cuBLASLt": {"13.1.0, " + root}, "cuDNN": {"9.19.1, " + host},
			}},
		{"a library that a variable names, in a program with another",
			[]string{"ULYSSES_NVIDIA_ROOT=" + root, "LD_PRELOAD=" + host, "ULYSSES_CUDNN_LIB=" + old},
			map[string][]string{
				"cuDNN": {old + " is 9.10.2"},
			}},
		{"another library",
			[]string{"ULYSSES_NVIDIA_ROOT=" + root,
				"ULYSSES_NCCL_LIB=" + filepath.Join(root, "cu13", "lib", "libnvrtc.so.13")}, map[string][]string{
				"NCCL": {"libnvrtc.so.13 has no nccl", "too old"},
			}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if c.env == nil && installed() {
				t.Skip("this system has NVIDIA's libraries")
			}
			run := exec.Command(os.Args[0], "-test.run=^TestLibraries$")
			run.Env = append([]string{child + "=1", "ULYSSES_CUDA_PLUGIN=" + plugin, "HOME=" + os.Getenv("HOME"),
				"PATH=" + os.Getenv("PATH")}, c.env...)
			out, err := run.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			checkFindings(t, string(out), c.want)
		})
	}
}

// checkFindings checks that the line of each library in the output contains the parts.
func checkFindings(t *testing.T, out string, want map[string][]string) {
	t.Helper()
	for name, parts := range want {
		line := ""
		for l := range strings.Lines(out) {
			if strings.HasPrefix(l, name+": ") {
				line = l
			}
		}
		for _, part := range parts {
			if !strings.Contains(line, part) {
				t.Errorf("%s: %q is not in %q", name, part, line)
			}
		}
	}
}

// cudnnStub compiles a cuDNN of a version, with all functions that the plug-in needs, under the
// name that a host program loads. It returns the path of the library.
func cudnnStub(t *testing.T, version string) string {
	t.Helper()
	forwards, err := os.ReadFile("plugin/libraries/dl_cudnn.cpp")
	if err != nil {
		t.Fatal(err)
	}
	source := "unsigned long cudnnGetVersion(void) { return VERSION; }\n"
	for _, f := range regexp.MustCompile(`\b(cudnn[A-Z]\w+)[,"]`).FindAllStringSubmatch(string(forwards), -1) {
		if f[1] != "cudnnGetVersion" {
			source += "void " + f[1] + "(void) {}\n"
		}
	}
	file := filepath.Join(t.TempDir(), "libcudnn.so.9")
	compile := exec.Command("gcc", "-shared", "-fPIC", "-DVERSION="+version, "-Wl,-soname,libcudnn.so.9", "-o", file,
		"-xc", "-")
	compile.Stdin = strings.NewReader(source)
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return file
}
