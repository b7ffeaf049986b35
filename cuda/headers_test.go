package cuda

import (
	"testing"

	"ulysses/testkit/cudatest"
)

// TestGemmLayout multiplies matrices as a column-major library would, told what cuBLASLt is told.
func TestGemmLayout(t *testing.T) { hostProgram(t, "libraries/gemm_layout_test.cpp") }

// TestNCCLTimeout reads ULYSSES_TIMEOUT as Go does.
func TestNCCLTimeout(t *testing.T) { hostProgram(t, "libraries/nccl_timeout_test.cpp") }

// TestConv1dIndex cuts documents and channels into what kernels take at a time.
func TestConv1dIndex(t *testing.T) { hostProgram(t, "kernels/conv1d_index_test.cpp") }

// TestSDPAShape is what cuDNN is asked for, and what it is told.
func TestSDPAShape(t *testing.T) { hostProgram(t, "libraries/sdpa_shape_test.cpp") }

// TestSDPAParts cuts heads that are not spread evenly into calls that cuDNN knows, and has own
// kernels run them in its place.
func TestSDPAParts(t *testing.T) {
	hostProgramWith(t, "libraries/sdpa_parts_test.cpp", cudatest.Use(t))
}
