package cpu

import (
	"os"

	"ulysses/tensor"
)

// Until all operations have BF16, the device offers it to tests that ask.
func init() {
	if os.Getenv("ULYSSES_TEST_BF16") != "" {
		compute = []tensor.DType{tensor.F32, tensor.BF16}
	}
}
