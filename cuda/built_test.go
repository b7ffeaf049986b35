package cuda

import (
	"bufio"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"ulysses/testkit/need"
)

const built = "../build/cuda/libulysses_cuda.so"

// needBuilt needs the plug-in that make cuda builds.
func needBuilt(t *testing.T) {
	t.Helper()
	need.File(t, built, "run make cuda")
}

// TestBuiltFile: the plug-in exports one function, links none of NVIDIA's libraries and no C++
// runtime, and runs on systems with glibc 2.35.
func TestBuiltFile(t *testing.T) {
	needBuilt(t)
	f, err := elf.Open(built)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var exported []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_BIND(s.Info) != elf.STB_LOCAL {
			exported = append(exported, s.Name)
		}
	}
	if !slices.Equal(exported, []string{"uly_cuda_plugin"}) {
		t.Errorf("exported: %v, want only uly_cuda_plugin", exported)
	}
	needed, err := f.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range needed {
		if !slices.Contains([]string{"libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
			"libdl.so.2", "libpthread.so.0",
			"librt.so.1"}, l) {
			t.Errorf("needs %s", l)
		}
	}
	imported, err := f.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	if len(imported) == 0 {
		t.Fatal("no imported symbols; nothing was checked")
	}
	most := newestGlibc(t)
	for _, s := range imported {
		if version, ok := strings.CutPrefix(s.Version, "GLIBC_"); ok && newer(version, most) {
			t.Errorf("%s needs %s; the newest supported is %s", s.Name, s.Version, most)
		}
	}
}

// newestGlibc returns the newest version of glibc that the plug-in may need: 2.35, so that a build
// on Debian 12 runs on Ubuntu 22.04. The headers and the libstdc++.a of a newer system refer to
// functions of its own glibc.
func newestGlibc(t *testing.T) string {
	out, err := exec.Command("getconf", "GNU_LIBC_VERSION").Output()
	here := strings.TrimPrefix(strings.TrimSpace(string(out)), "glibc ")
	if err != nil || !newer(here, "2.0") {
		t.Fatalf("getconf GNU_LIBC_VERSION: %q, %v", out, err)
	}
	if newer(here, "2.36") {
		return here
	}
	return "2.35"
}

// newer compares dotted version numbers.
func newer(a, b string) bool {
	numbers := func(s string) (n []int) {
		for p := range strings.SplitSeq(s, ".") {
			i, _ := strconv.Atoi(p)
			n = append(n, i)
		}
		return n
	}
	return slices.Compare(numbers(a), numbers(b)) > 0
}

// spilling has the kernels that may use local memory, by a part of their symbol, each with the
// reason.
var spilling = map[string]string{
	"attention_mma_scored_dkv_kernelILi1ELb1E": "dk, dv and a tile of dq take 96 registers; with the options of scores, 28 bytes spill",
	"attention_mma_scored_forward_kernelILi1E": "the output takes 128 registers; with the options of scores, 16 bytes spill",
	"attention_dkv_kernelILi2ELb1E":            "dk and dv of the widest heads take 128 registers; with the options of scores, 24 bytes spill",
}

// TestScanLoops: between the first and the last product of a chunk, scans of the gated delta rule
// access no local memory, wherever they do elsewhere.
func TestScanLoops(t *testing.T) {
	scans := 0
	kernelsBuilt(t, func(symbol string, code []instruction) {
		if !strings.Contains(symbol, "delta_scan_tiles") && !strings.Contains(symbol, "delta_scan_back_tiles") {
			return
		}
		scans++
		product := func(i instruction) bool { return i.is(0x23c) } // HMMA
		chunk := code[slices.IndexFunc(code, product):]
		for len(chunk) > 0 && !product(chunk[len(chunk)-1]) {
			chunk = chunk[:len(chunk)-1]
		}
		if local := count(chunk, 0x983) + count(chunk, 0x387); local > 0 { // LDL, STL
			t.Errorf("%s: %d accesses to local memory for each chunk", symbol, local)
		}
	})
	if scans == 0 || scans%9 != 0 {
		t.Errorf("%d scans, want a multiple of 9", scans)
	}
}

var (
	entry = regexp.MustCompile(`Compiling entry function '(\S+)' for '(\S+)'`)
	frame = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
)

// TestRegisters reads the assembler's output. A kernel that spills registers, or keeps an array in
// local memory, is many times slower.
func TestRegisters(t *testing.T) {
	needBuilt(t)
	f, err := os.Open("../build/cuda/ptxas.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	used := map[string]bool{}
	kernels, name := 0, ""
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if m := entry.FindStringSubmatch(lines.Text()); m != nil {
			name = m[1] + " for " + m[2]
			kernels++
		}
		m := frame.FindStringSubmatch(lines.Text())
		if m == nil || name == "" || m[1] == "0" && m[2] == "0" && m[3] == "0" {
			continue
		}
		allowed := false
		for part := range spilling {
			if strings.Contains(name, part) {
				used[part], allowed = true, true
			}
		}
		if !allowed {
			t.Errorf("%s: %s", name, m[0])
		}
	}
	if lines.Err() != nil || kernels < 10 {
		t.Fatalf("%d kernels in ptxas.txt, %v", kernels, lines.Err())
	}
	for part, why := range spilling {
		if !used[part] {
			t.Errorf("%q (%s) uses no local memory; remove it from the list", part, why)
		}
	}
}

// onTensorCores has the kernels that multiply BF16, by parts of their symbols.
var onTensorCores = []string{"delta_prepare_kernel", "delta_gradients_kernel"}

// inTiles has the kernels that support only BF16: the number of instantiations for a GPU, and the
// minimum of products of a warp in each. Fewer would mean that some products do not use tensor
// cores.
var inTiles = map[string]struct{ builds, products int }{
	"attention_mma_forward_kernel": {6, 128}, "attention_mma_dq_kernel": {3, 96}, "attention_mma_dkv_kernel": {6, 128},
	"attention_mma_delta":                 {1, 2},
	"attention_mma_scored_forward_kernel": {3, 128}, "attention_mma_scored_dq_kernel": {3, 96},
	"attention_mma_scored_dkv_kernel": {6, 128},
	"delta_scan_tiles":                {6, 104}, "delta_scan_back_tiles": {3, 156},
}

// tileInstructions has, for heads of 128, the instructions of the GPU in a kernel of attention: the
// products of a tile (HMMA), and the most loads of operands from shared memory (LDSM) for them.
// Shared memory delivers a load in 4 clocks for all warps of a multiprocessor. A product takes
// about 6.4 clocks of a quarter of it. With more than 0.4 loads a product, tensor cores wait.
var tileInstructions = map[string]struct{ products, loads int }{
	"attention_mma_forward_kernelILi1ELb0E": {256, 80},
	"attention_mma_forward_kernelILi1ELb1E": {256, 80},
	"attention_mma_dq_kernelILi1E":          {192, 80},
	"attention_mma_dkv_kernelILi1ELb0E":     {256, 112},
	"attention_mma_dkv_kernelILi1ELb1E":     {320, 136},
}

// TestTileInstructions: every product of a tile is in the kernel once, with no more loads than its
// operands take.
func TestTileInstructions(t *testing.T) {
	found := 0
	kernelsBuilt(t, func(symbol string, code []instruction) {
		for name, want := range tileInstructions {
			if !strings.Contains(symbol, name) {
				continue
			}
			found++
			if products, loads := count(code, 0x23c), count(code, 0x83b); products != want.products ||
				loads > want.loads || loads == 0 {
				t.Errorf("%s: %d products with %d loads, want %d with at most %d", symbol, products, loads,
					want.products, want.loads)
			}
		}
	})
	if found == 0 || found%len(tileInstructions) != 0 {
		t.Errorf("%d kernels, want a multiple of %d", found, len(tileInstructions))
	}
}

// instruction is an instruction of the GPU. The lowest 12 bits of low are the operation.
type instruction struct{ low, high uint64 }

func (i instruction) is(code uint64) bool { return i.low&0xfff == code }

func count(code []instruction, of uint64) (n int) {
	for _, i := range code {
		if i.is(of) {
			n++
		}
	}
	return n
}

// kernelsBuilt calls f for every kernel of every GPU that the plug-in is built for, if the kernel
// is stored uncompressed.
func kernelsBuilt(t *testing.T, f func(symbol string, code []instruction)) {
	t.Helper()
	needBuilt(t)
	file, err := elf.Open(built)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	section := file.Section(".nv_fatbin")
	if section == nil {
		t.Fatal("no kernels in the plug-in")
	}
	fat, err := section.Data()
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; ; at++ {
		next := bytes.Index(fat[at:], []byte(elf.ELFMAG))
		if next < 0 {
			break
		}
		at += next
		gpu, err := elf.NewFile(bytes.NewReader(fat[at:]))
		if err != nil || gpu.Machine != 190 { // EM_CUDA
			continue
		}
		for _, s := range gpu.Sections {
			symbol, kernel := strings.CutPrefix(s.Name, ".text.")
			if !kernel {
				continue
			}
			raw, err := s.Data()
			if err != nil {
				t.Fatal(err)
			}
			var code []instruction
			for ; len(raw) >= 16; raw = raw[16:] {
				code = append(code, instruction{binary.LittleEndian.Uint64(raw), binary.LittleEndian.Uint64(raw[8:])})
			}
			f(symbol, code)
		}
	}
}

// inVectors has the BF16 kernels that access memory in units of 16 bytes, by their symbols. ALIGNED
// is the last parameter of the norms' kernels.
var inVectors = regexp.MustCompile(
	`elementwise_units.*\d(Add|SwiGLUI\d\w+E\d+(?:Forward|Backward|BackwardRestore)|SigmoidForward|SigmoidBackward)E13__nv_bfloat16Li8|` +
		`(rope_units|rope_normed)I13__nv_bfloat16Li8|` +
		`(norm_forward|norm_backward|norm_backward_long|gated_forward|gated_backward)I13__nv_bfloat16.*Lb1EEE`)

// TestVectors reads the GPU's instructions: these kernels must write 16 bytes at a time. The
// compiler splits some stores, which makes the kernel slower by the same factor.
func TestVectors(t *testing.T) {
	found := map[string]int{}
	kernelsBuilt(t, func(symbol string, code []instruction) {
		m := inVectors.FindStringSubmatch(symbol)
		if m == nil {
			return
		}
		found[m[1]+m[2]+m[3]]++
		wide, narrow := 0, 0
		for _, i := range code {
			if !i.is(0x986) { // STG
				continue
			}
			switch size := i.high >> 9 & 7; { // 0 to 3: one or two bytes; 4, 5, 6: 4, 8, 16
			case size == 6:
				wide++
			case size < 4:
				narrow++
			}
		}
		if wide == 0 || narrow > 0 {
			t.Errorf("%s: %d stores of 16 bytes, %d of one or two", symbol, wide, narrow)
		}
	})
	if len(found) != 19 {
		t.Errorf("found %v: want 19 names", found)
	}
}

// TestTensorCores: these kernels use tensor cores in BF16. In F32 they do not, because tensor cores
// would lose precision.
func TestTensorCores(t *testing.T) {
	found := map[string]int{} // instantiations of a kernel
	kernelsBuilt(t, func(symbol string, code []instruction) {
		if products := count(code, 0x23c); products > 0 && strings.Contains(symbol, "_f32") {
			t.Errorf("%s: %d instructions of tensor cores", symbol, products)
		}
		for name, want := range inTiles {
			if products := count(code, 0x23c); strings.Contains(symbol, name) {
				found[name]++
				if products < want.products {
					t.Errorf("%s: %d instructions of tensor cores, want %d", symbol, products, want.products)
				}
			}
		}
		for _, name := range onTensorCores {
			if !strings.Contains(symbol, name) {
				continue
			}
			products := count(code, 0x23c) // HMMA
			bf16 := strings.Contains(symbol, "bfloat16")
			found[name+map[bool]string{true: " BF16", false: " F32"}[bf16]]++
			if bf16 != (products > 0) {
				t.Errorf("%s: %d instructions of tensor cores", symbol, products)
			}
		}
	})
	builds := 0
	for _, name := range onTensorCores {
		for _, suffix := range []string{" BF16", " F32"} {
			n := found[name+suffix]
			if builds = max(builds, n); n == 0 || n != builds {
				t.Errorf("%s%s is built for %d GPUs, others for %d", name, suffix, n, builds)
			}
		}
	}
	for name, want := range inTiles {
		if found[name] != want.builds*builds {
			t.Errorf("%s has %d instantiations for %d GPUs, want %d for each", name, found[name], builds, want.builds)
		}
	}
}
