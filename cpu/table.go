package cpu

// #include "kernels/kernels.h"
import "C"

import (
	"os"
	"slices"
	"strings"
	"unsafe"

	"github.com/klauspost/cpuid/v2"

	"ulysses/cpu/kernels"
	"ulysses/internal/status"
)

// table is a row of the instruction-set table: what a set needs and the kernels built for it.
type table struct {
	name    string
	needs   []cpuid.FeatureID
	lanes   int   // floats in a vector
	pair    int64 // elements of BF16 in a lane of a product: 2 with VDPBF16PS
	kernels *[C.K_COUNT]C.uly_kernel
	rest    *[C.K_COUNT]C.uly_kernel // of the kernels that it has not; nil where it has all
}

var tables = rowsFor(cpuid.CPU.VendorID)

// rowsFor are the rows for a maker's CPUs, best first. Rows are chosen by feature bits, not by
// maker or model: libraries that go by the model misjudge new ones. The exception was measured:
// Intel's cores begin a VDPBF16PS every other cycle, which is half the rate of multiply-adds of F32
// (their way to products of BF16 is AMX), where AMD's make it at twice that rate.
func rowsFor(maker cpuid.Vendor) []table {
	rows := []table{
		{"avx512bf16", append([]cpuid.FeatureID{cpuid.AVX512BF16}, avx512...), 16, 2, built(kernels.AVX512BF16), built(kernels.AVX512)},
		{"avx512", avx512, 16, 1, built(kernels.AVX512), nil},
		{"avx2", []cpuid.FeatureID{cpuid.AVX2, cpuid.FMA3, cpuid.BMI1, cpuid.BMI2}, 8, 1, built(kernels.AVX2), nil},
		{"portable", nil, 4, 1, built(kernels.Portable), nil},
	}
	if maker == cpuid.Intel {
		rows[0], rows[1] = rows[1], rows[0]
	}
	return rows
}

func built(p unsafe.Pointer) *[C.K_COUNT]C.uly_kernel { return (*[C.K_COUNT]C.uly_kernel)(p) }

var avx512 = []cpuid.FeatureID{cpuid.AVX512F, cpuid.AVX512DQ, cpuid.AVX512BW, cpuid.AVX512VL, cpuid.FMA3, cpuid.AVX2, cpuid.BMI1, cpuid.BMI2}

// kernel is a kernel of the row.
func (t *table) kernel(k int) C.uly_kernel {
	if f := t.kernels[k]; f != nil || t.rest == nil {
		return f
	}
	return t.rest[k]
}

// EnvISA names the environment variable that pins an instruction set where Options leave it open.
const EnvISA = "ULYSSES_ISA"

// runs reports whether this CPU has what the row needs and this build has its kernels.
func (t *table) runs() bool { return cpuid.CPU.Supports(t.needs...) && t.kernels[C.K_gemm] != nil }

// ISAs are the instruction sets this CPU can run, best first; the last is always "portable".
func ISAs() []string {
	var names []string
	for i := range tables {
		if tables[i].runs() {
			names = append(names, tables[i].name)
		}
	}
	return names
}

// choose finds the row of a name; "" is the environment's, else the best this CPU runs. A set that
// is unknown or that the CPU lacks is Unsupported.
func choose(isa string) (*table, error) {
	if isa == "" {
		isa = os.Getenv(EnvISA)
	}
	if isa == "" {
		isa = ISAs()[0]
	}
	i := slices.IndexFunc(tables, func(t table) bool { return t.name == isa })
	if i < 0 || !tables[i].runs() {
		return nil, status.Errorf(status.Unsupported, "cpu.New: instruction set %q: this CPU runs %s; unset %s or name one of them",
			isa, strings.Join(ISAs(), ", "), EnvISA)
	}
	return &tables[i], nil
}
