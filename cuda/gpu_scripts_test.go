package cuda

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// scripted is a folder of programs that replace others.
func scripted(t *testing.T, programs map[string]string) string {
	t.Helper()
	folder := t.TempDir()
	for name, text := range programs {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// on runs a command with a folder first on PATH, and returns its exit code and output.
func on(t *testing.T, programs string, env []string, argv ...string) (int, string) {
	t.Helper()
	c := exec.Command(argv[0], argv[1:]...)
	c.Env = append(append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"), "ULYSSES_NVIDIA_ROOT=/none", "OUT="),
		env...)
	out, _ := c.CombinedOutput()
	return c.ProcessState.ExitCode(), string(out)
}

// withoutGPU skips the test on a machine with a GPU.
func withoutGPU(t *testing.T) {
	t.Helper()
	if found, _ := filepath.Glob("/dev/nvidia[0-9]*"); len(found) > 0 {
		t.Skip("SKIPPED: this machine has a GPU")
	}
}

const manyGPUs = `for i in $(seq 0 2000); do echo "GPU $i: NVIDIA stand-in (UUID: GPU-$i)"; done`

// TestGPUCheck: the output and exit status of gpu-check for test programs that pass, fail, skip,
// crash or do nothing.
func TestGPUCheck(t *testing.T) {
	withoutGPU(t)
	const fails = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
	for name, c := range map[string]struct {
		smi, doctor, tests string
		code               int
		want               []string
	}{
		"no GPU": {"exit 127", "", "exit 0", 77,
			[]string{"no GPU on this machine; nothing was checked (77)"}},
		"no driver": {"echo \"" + fails + "\"; exit 9", "", "exit 0", 77,
			[]string{"nothing was checked (77)"}},
		"no devices": {"echo No devices found.; exit 6", "  GPUs  none", "exit 0", 77,
			[]string{"nothing was checked (77)"}},
		"one that doctor finds": {"exit 127", "  GPU 0  stand-in, 1 GiB free", "echo '--- PASS: TestCUDAx (0.10s)'", 0,
			[]string{"ok", "comm: TestCUDAx", "1 checks: 1 passed, 0 failed, 0 skipped"}},
		"passes": {manyGPUs, "",
			"printf -- '--- PASS: TestCUDAx (0.10s)\n    --- PASS: TestCUDAx/part (0.05s)\n        --- PASS: TestCUDAx/part/of (0.05s)\n'",
			0,
			[]string{"TestCUDAx/part\n", "2 checks: 2 passed"}},
		"one fails": {manyGPUs, "",
			"printf -- '    x_test.go:7: 3 is not 4\n--- FAIL: TestCUDAx (0.10s)\n--- PASS: TestCUDAy (0.10s)\nFAIL\n'; exit 1",
			1,
			[]string{"x_test.go:7: 3 is not 4", "FAILED", "comm: TestCUDAx", "2 checks: 1 passed, 1 failed"}},
		"its own reason": {manyGPUs, "",
			"printf -- '    x_test.go:7: SKIPPED: no second GPU\n--- SKIP: TestCUDAx (0.00s)\n--- PASS: TestCUDAy (0.10s)\n    x_test.go:9: SKIPPED: too small\n--- SKIP: TestCUDAz (0.00s)\n'",
			0,
			[]string{"comm: TestCUDAx: no second GPU\n", "comm: TestCUDAz: too small\n",
				"3 checks: 1 passed, 0 failed, 2 skipped"}},
		"nothing but skips": {manyGPUs, "",
			"printf -- '    x_test.go:7: SKIPPED: because\n--- SKIP: TestCUDAx (0.00s)\n'", 1,
			[]string{"1 checks: 0 passed, 0 failed, 1 skipped"}},
		"no tests": {manyGPUs, "", "echo testing: warning: no tests to run; echo PASS", 1,
			[]string{"comm: no test ran", "1 checks: 0 passed, 1 failed"}},
		"crashes": {manyGPUs, "", "echo '--- PASS: TestCUDAx (0.10s)'; echo 'fatal error: out of it'; exit 2", 1,
			[]string{"fatal error: out of it", "comm: exit 2", "2 checks: 1 passed, 1 failed"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bundle := scripted(t, map[string]string{"bin/ulysses-mpi": "echo '" + c.doctor + "'", "openmpi/env.sh": "",
				"tests/comm.test": c.tests})
			programs := scripted(t, map[string]string{"nvidia-smi": c.smi})
			code, out := on(t, programs, []string{"CHECKS=comm"}, "../scripts/gpu-check.sh", bundle)
			if code != c.code {
				t.Errorf("exit %d, want %d\n%s", code, c.code, out)
			}
			for _, w := range c.want {
				if !strings.Contains(out, w) {
					t.Errorf("%q is not in\n%s", w, out)
				}
			}
		})
	}
}

// TestGPUCheckParts: a part runs its checks, ends within its time and says what it has not run. The
// archive has the logs of all checks that ran.
func TestGPUCheckParts(t *testing.T) {
	withoutGPU(t)
	programs := scripted(t, map[string]string{"nvidia-smi": manyGPUs})
	for name, c := range map[string]struct {
		env  []string
		code int
		want []string
	}{
		"an unknown part": {[]string{"PART=9"}, 2, []string{"there is no part 9; set PART to 1 to 8"}},
		// bash would read these as -1, the last one; as 3; and as no number: all parts
		"a negative part": {[]string{"PART=-1"}, 2, []string{"there is no part -1"}},
		"two parts":       {[]string{"PART=2,3"}, 2, []string{"there is no part 2,3"}},
		"a part like 08":  {[]string{"PART=08"}, 2, []string{"there is no part 08"}},
		"an unknown check": {[]string{"CHECKS=comm conformance"}, 2,
			[]string{"there is no check conformance; CHECKS may have hello device"}},
		"a part and checks": {[]string{"PART=5", "CHECKS=device"}, 2, []string{"are both set; set one of them"}},
		"no number":         {[]string{"PART=5", "MINUTES=five"}, 2, []string{"MINUTES=five is not a number"}},
		// 25 s, of which 15 are for the archive: too little to begin
		"no time": {[]string{"PART=5", "MINUTES=0.4"}, 1,
			[]string{"not run, because the part's time is over: comm processes"}},
		"too slow": {[]string{"PART=5", "MINUTES=0.6"}, 1,
			[]string{"comm: TestCUDAx", "ran past", "not run, because the part's time is over: processes"}},
		"too short": {[]string{"CHECKS=processes"}, 0, []string{"processes: TestCUDAy", "1 checks: 1 passed"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bundle := scripted(t, map[string]string{"bin/ulysses-mpi": "", "openmpi/env.sh": "",
				"tests/comm.test":        "echo '--- PASS: TestCUDAx (0.10s)'; sleep 60",
				"tests/ulysses-mpi.test": "echo '--- PASS: TestCUDAy (0.10s)'"})
			out := t.TempDir()
			code, said := on(t, programs, append(c.env, "OUT="+out), "../scripts/gpu-check.sh", bundle)
			if code != c.code {
				t.Errorf("exit %d, want %d\n%s", code, c.code, said)
			}
			for _, w := range c.want {
				if !strings.Contains(said, w) {
					t.Errorf("%q is not in\n%s", w, said)
				}
			}
			if code == 2 {
				return
			}
			archives, _ := filepath.Glob(filepath.Join(out, "*"))
			if len(archives) != 1 {
				t.Fatal("written:", archives)
			}
			names, err := exec.Command("tar", "tzf", archives[0]).Output()
			if err != nil || !strings.Contains(string(names), "doctor.log") ||
				strings.Contains(said, "TestCUDAx") != strings.Contains(string(names), "comm.log") {
				t.Errorf("%s has %s, %v", archives[0], names, err)
			}
		})
	}
}

// TestGPUCheckNames: the tests that gpu-check names exist, so that it runs and leaves out the right
// ones.
func TestGPUCheckNames(t *testing.T) {
	read := func(glob string) string {
		files, err := filepath.Glob(glob)
		if err != nil || len(files) == 0 {
			t.Fatal(glob, err)
		}
		all := ""
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all += string(text)
		}
		return all
	}
	script, tests, operations := read("../scripts/gpu-check.sh"), read("*_test.go"), read("../testkit/conformance/*.go")
	there := func(list, format, in string) {
		names := strings.Split(list, "|")
		if len(names) == 0 || names[0] == "" {
			t.Errorf("no names of the form %s", format)
		}
		for _, n := range names {
			if !strings.Contains(in, fmt.Sprintf(format, n)) {
				t.Errorf("gpu-check names %s, which does not exist", n)
			}
		}
	}
	skip := regexp.MustCompile(`-test\.skip '\^Test\(([\w|]+)\)\$'`).FindStringSubmatch(script)
	run := regexp.MustCompile(`-test\.run '\^Test(\w+)\$'`).FindAllStringSubmatch(script, -1)
	ops := regexp.MustCompile(`(?s)for ops in (.*?); do`).FindStringSubmatch(script)
	if skip == nil || len(run) < 2 || ops == nil {
		t.Fatal("this test does not parse gpu-check.sh correctly")
	}
	there(skip[1], "func Test%s(", tests)
	for _, m := range run {
		there(m[1], "func Test%s(", tests)
	}
	for _, m := range regexp.MustCompile(`'([\w|]+)'`).FindAllStringSubmatch(ops[1], -1) {
		there(m[1], `{"%s", test`, operations)
	}
}

// TestGPUBench: gpu-bench keeps its measurements if a later program fails, and reports the failure.
// Without a GPU, or if a program never runs, it writes nothing.
func TestGPUBench(t *testing.T) {
	withoutGPU(t)
	const measures = `[ "$1" != gpu_ops ] || echo '{"peer":"ulysses","case":"copy","op":"memory","min_s":0.5,"median_s":0.5,"gbs":4}'`
	for name, c := range map[string]struct {
		smi, bench, python string
		code               int
		want               []string
		kept               bool
	}{
		"no GPU": {"exit 127", "exit 6", "exit 77", 77,
			[]string{"no GPU on this machine; nothing was measured (77)"}, false},
		"all measured": {"echo stand-in", measures, "exit 77", 0, []string{"|copy|500.000|4|1.00|"}, true},
		"one fails": {"echo stand-in", `[ "$1" = gpu_ops ] || { echo no memory >&2; exit 6; }; ` + measures,
			"exit 77", 1, []string{"|copy|500.000|", "no memory", "1 programs failed: bench gpu_host (6)"}, true},
		"PyTorch's": {"echo stand-in", measures, "exit 3", 1, []string{"|copy|", "python torch_gpu.py (3)"}, true},
		"all fail":  {"echo stand-in", "exit 6", "exit 77", 1, []string{"nothing was measured"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			programs, out := scripted(t, map[string]string{"nvidia-smi": c.smi, "bench": c.bench, "python": c.python}),
				t.TempDir()
			code, said := on(t, programs, nil, "python3", "../benchmarks/gpu.py", "--suites", "gpu_ops,gpu_host",
				"--rounds", "1", "--out", out,
				"--ulysses", filepath.Join(programs, "bench"), "--python", filepath.Join(programs, "python"))
			if code != c.code {
				t.Errorf("exit %d, want %d\n%s", code, c.code, said)
			}
			for _, w := range c.want {
				if !strings.Contains(said, w) {
					t.Errorf("%q is not in\n%s", w, said)
				}
			}
			if written, _ := filepath.Glob(filepath.Join(out, "gpu-*.json")); (len(written) == 1) != c.kept {
				t.Errorf("written: %v", written)
			}
		})
	}
}

// TestGPUBenchKeeps: a run of gpu-bench keeps the results of suites that it does not measure, and
// the suite gpu_step has the steps of a job after the first.
func TestGPUBenchKeeps(t *testing.T) {
	withoutGPU(t)
	line := func(name, op, seconds string) string {
		return `echo '{"peer":"ulysses","case":"` + name + `","op":"` + op + `","min_s":` + seconds + `,"median_s":` +
			seconds + `,"gbs":4,"gflops":4}'`
	}
	step := func(n, seconds string) string {
		return `echo '{"step":` + n + `,"seconds":` + seconds +
			`,"model_tflops":500,"tokens":131072,"peak_bytes":2147483648}'`
	}
	programs := scripted(t,
		map[string]string{"nvidia-smi": "echo stand-in", "python": "exit 77", "bench": `case "$PROGRAM$1" in
gpu_ops) ` + line("copy of heads", "memory", `'"$SECONDS_OF_A_COPY"'`) + `;;
gpu_loss) ` + line("head", "forward+backward", "0.25") + `;;
ulysses-mpirun) out=${4#output.dir=}; mkdir -p "$out"; { ` + step("1", "90") + "; " + step("2", "40") + "; " + step("3", "44") + `; } > "$out/metrics.jsonl";;
*) exit 6;;
esac`})
	out := t.TempDir()
	run := func(suites, seconds string) string {
		t.Helper()
		return benched(t, programs, out, "SECONDS_OF_A_COPY="+seconds, "--suites", suites)
	}
	run("gpu_ops", "0.5")
	run("gpu_loss", "0.5")
	kept := run("gpu_step", "0.5")
	for _, want := range []string{"|copy of heads|500.000|", "|head|forward+backward|250.000|",
		"|gpu-step|42.00|3121|476|2.0|", "- gpu_ops, gpu_loss, gpu_step: driver stand-in"} {
		if !strings.Contains(kept, want) {
			t.Errorf("%q is not in\n%s", want, kept)
		}
	}
	if again := run("gpu_ops", "0.125"); !strings.Contains(again, "|copy of heads|125.000|") ||
		strings.Contains(again, "500.000") || !strings.Contains(again, "|head|") {
		t.Errorf("a second measurement of a suite does not replace the first one:\n%s", again)
	}
}

// benched runs a round of gpu.py with stand-ins for its programs and a variable for these, and
// returns the table that it has written to out.
func benched(t *testing.T, programs, out, variable string, flags ...string) string {
	t.Helper()
	command := []string{"env", variable, "python3", "../benchmarks/gpu.py", "--rounds", "1", "--out", out,
		"--ulysses", filepath.Join(programs, "bench"), "--python", filepath.Join(programs, "python")}
	code, said := on(t, programs, nil, append(command, flags...)...)
	if code != 0 {
		t.Fatalf("exit %d\n%s", code, said)
	}
	written, err := os.ReadFile(filepath.Join(out, "gpu-stand-in.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(written)
}

// TestGPUBenchKeepsCases: a run of some cases keeps the results of the other cases of a suite, each
// with its conditions, and a run of all cases replaces them.
func TestGPUBenchKeepsCases(t *testing.T) {
	withoutGPU(t)
	programs := scripted(t, map[string]string{"nvidia-smi": "echo stand-in", "python": "exit 77",
		"bench": `for c in $(echo "${5:-128k}" | tr , ' '); do
echo '{"peer":"ulysses","case":"llama8b-'$c'","op":"forward+backward","min_s":'$TIME',"median_s":'$TIME',"gflops":4}'
done`})
	out := t.TempDir()
	run := func(cases, seconds string) string {
		t.Helper()
		return benched(t, programs, out, "TIME="+seconds, "--suites", "gpu_layer", "--cases", cases)
	}
	check := func(written string, wanted, unwanted []string) {
		t.Helper()
		for _, w := range wanted {
			if !strings.Contains(written, w) {
				t.Errorf("%q is not in\n%s", w, written)
			}
		}
		for _, w := range unwanted {
			if strings.Contains(written, w) {
				t.Errorf("%q is in\n%s", w, written)
			}
		}
	}
	run("32k", "0.5")
	check(run("128k,512k", "0.25"), []string{"|llama8b-32k|forward+backward|500.0",
		"|llama8b-128k|forward+backward|250.0", "|llama8b-512k|", "gpu_layer 32k", "gpu_layer 128k,512k: driver"}, nil)
	check(run("32k,128k", "0.125"), []string{"|llama8b-32k|forward+backward|125.0",
		"|llama8b-128k|forward+backward|125.0", "|llama8b-512k|forward+backward|250.0", "gpu_layer 128k,512k",
		"gpu_layer 32k,128k: driver"}, []string{"gpu_layer 32k:", "gpu_layer 32k, gpu_layer"})
	check(run("", "0.0625"), []string{"|llama8b-128k|forward+backward|62.5", "- gpu_layer: driver"},
		[]string{"512k", "32k"})
}
