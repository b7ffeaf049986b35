package cuda

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"ulysses/testkit/cudatest"
)

// hostProgram compiles a C++ test of the plug-in's headers and runs it on the host, in parallel to
// other tests.
func hostProgram(t *testing.T, source string) {
	t.Parallel()
	t.Helper()
	hostProgramWith(t, source)
}

// hostProgramWith compiles a C++ test and runs it with arguments.
func hostProgramWith(t *testing.T, source string, args ...string) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "test")
	compile := exec.Command(cmp.Or(os.Getenv("CXX"), "g++"), "-std=c++17", "-O2", "-Wall", "-Wextra",
		"-Wno-unknown-pragmas", "-Werror", "-fsanitize=undefined",
		"-fno-sanitize-recover=undefined", "-Iplugin", "-Iplugin/libraries/fakes", "-o", program,
		filepath.Join("plugin", source), "-ldl")
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", compile, err, out)
	}
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", source, err, out)
	}
}

// TestIndexArithmetic tests merged axes, walks, tiles and parts, with extents larger than any
// memory.
func TestIndexArithmetic(t *testing.T) { hostProgram(t, "kernels/index_test.cpp") }

// TestAttentionIndex compares masks, tiles and workspaces of attention with their definitions.
func TestAttentionIndex(t *testing.T) { hostProgram(t, "kernels/attention_index_test.cpp") }

// TestDeltaIndex compares chunks, their boundaries and workspaces of the gated delta rule with
// their definitions.
func TestDeltaIndex(t *testing.T) { hostProgram(t, "kernels/delta_index_test.cpp") }

// TestConv1dIndex tests how documents and channels are divided among the convolution's launches.
func TestConv1dIndex(t *testing.T) { hostProgram(t, "kernels/conv1d_index_test.cpp") }

// TestFragments compares the registers that lanes pass to tensor cores with NVIDIA's documentation;
// the emulated plug-in multiplies without tensor cores.
func TestFragments(t *testing.T) { hostProgram(t, "kernels/mma_test.cpp") }

// TestGemmLayout multiplies matrices as a column-major library does, with the arguments that
// cuBLASLt gets.
func TestGemmLayout(t *testing.T) { hostProgram(t, "libraries/gemm_layout_test.cpp") }

// TestNCCLTimeout compares how the plug-in and Go parse ULYSSES_TIMEOUT.
func TestNCCLTimeout(t *testing.T) { hostProgram(t, "libraries/nccl_timeout_test.cpp") }

// TestNCCLPlugin runs the plug-in's calls of NCCL on a fake NCCL: the order of the stream, calls
// that peers do not join, aborts by other threads, kernels that hang.
func TestNCCLPlugin(t *testing.T) { hostProgram(t, "libraries/nccl_test.cpp") }

// TestSDPAShape compares the arguments that cuDNN gets with the definition of attention.
func TestSDPAShape(t *testing.T) { hostProgram(t, "libraries/sdpa_shape_test.cpp") }

// TestSDPASplit splits attention whose key heads have different numbers of query heads into calls
// that cuDNN supports, and runs these calls on the plug-in's own kernels.
func TestSDPASplit(t *testing.T) {
	hostProgramWith(t, "libraries/sdpa_split_test.cpp", cudatest.Use(t))
}
