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

// table describes one instruction set: the CPU features that it needs, and its kernels.
type table struct {
	name    string
	needs   []cpuid.FeatureID
	lanes   int   // floats in a vector
	pair    int64 // BF16 elements in a lane of a product: 2 with VDPBF16PS
	kernels *[C.K_COUNT]C.uly_kernel
	// table of the kernels that this set does not have; nil if it has all
	rest *[C.K_COUNT]C.uly_kernel
}

var tables = tablesFor(cpuid.CPU.VendorID)

// tablesFor returns the instruction sets for the CPUs of a vendor, the fastest first. A set is
// chosen by feature bits and not by the CPU's model, because new models would be unknown. The order
// has one exception, which was measured: Intel's cores start a VDPBF16PS every second cycle, half
// the rate of F32 multiply-adds (Intel's fast products of BF16 are AMX), and AMD's cores reach
// twice that rate.
func tablesFor(vendor cpuid.Vendor) []table {
	sets := []table{
		{"avx512bf16", append([]cpuid.FeatureID{cpuid.AVX512BF16}, avx512...), 16, 2, built(kernels.AVX512BF16),
			built(kernels.AVX512)},
		{"avx512", avx512, 16, 1, built(kernels.AVX512), nil},
		{"avx2", []cpuid.FeatureID{cpuid.AVX2, cpuid.FMA3, cpuid.BMI1, cpuid.BMI2}, 8, 1, built(kernels.AVX2), nil},
		{"neon", []cpuid.FeatureID{cpuid.ASIMD}, 4, 1, built(kernels.NEON), nil},
		{"portable", nil, 4, 1, built(kernels.Portable), nil},
	}
	if vendor == cpuid.Intel {
		sets[0], sets[1] = sets[1], sets[0]
	}
	return sets
}

func built(p unsafe.Pointer) *[C.K_COUNT]C.uly_kernel { return (*[C.K_COUNT]C.uly_kernel)(p) }

var avx512 = []cpuid.FeatureID{cpuid.AVX512F, cpuid.AVX512DQ, cpuid.AVX512BW, cpuid.AVX512VL, cpuid.FMA3, cpuid.AVX2,
	cpuid.BMI1, cpuid.BMI2}

// kernel returns the function of kernel k.
func (t *table) kernel(k int) C.uly_kernel {
	if f := t.kernels[k]; f != nil || t.rest == nil {
		return f
	}
	return t.rest[k]
}

// EnvISA is the environment variable that selects an instruction set if Options.ISA is empty.
const EnvISA = "ULYSSES_ISA"

// runs reports whether this CPU has the features of the set and this build has its kernels.
func (t *table) runs() bool { return cpuid.CPU.Supports(t.needs...) && t.kernels[C.K_gemm] != nil }

// ISAs returns the instruction sets that this CPU has, the fastest first. The last is always
// "portable".
func ISAs() []string {
	var names []string
	for i := range tables {
		if tables[i].runs() {
			names = append(names, tables[i].name)
		}
	}
	return names
}

// choose returns the instruction set of a name. "" is the value of EnvISA, or the fastest set. The
// error for an unknown set, or one that the CPU does not have, is Unsupported.
func choose(isa string) (*table, error) {
	if isa == "" {
		isa = os.Getenv(EnvISA)
	}
	if isa == "" {
		isa = ISAs()[0]
	}
	i := slices.IndexFunc(tables, func(t table) bool { return t.name == isa })
	if i < 0 || !tables[i].runs() {
		return nil, status.Errorf(status.Unsupported,
			"cpu.New: this CPU does not have the instruction set %q, it has %s; unset %s or give one of these",
			isa, strings.Join(ISAs(), ", "), EnvISA)
	}
	return &tables[i], nil
}
