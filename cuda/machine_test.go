package cuda

import (
	"bytes"
	"cmp"
	"debug/elf"
	"encoding/binary"
	flags "flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/testkit/need"
)

var update = flags.Bool("update", false, "write the tables of docs/gpu-kernels.md")

const kernelsPage = "../docs/gpu-kernels.md"

// machineCode describes a kernel's instructions for a GPU with compute capability 9.0.
type machineCode struct {
	registers, static int64 // static: bytes of shared memory of fixed size
	most              int64 // threads of a block, by __launch_bounds__
	spilled           int64 // bytes of spill stores and loads, and of the stack frame
	whole, loop       instructions
	step              step // of the loop
}

// instructions counts some of a range.
type instructions struct {
	all  int
	hmma int // products on tensor cores: of 16 x 8 x 16 (HMMA), or of warpgroups (HGMMA)
	ldsm int // ldmatrix
	cp   int // LDGSTS: cp.async
	ldg  int // loads from global memory
}

// Operations of sm_90, the lowest 12 bits of an instruction.
const (
	opHMMA, opLDSM, opLDGSTS, opLDG, opBRA, opNOP = 0x23c, 0x83b, 0xfae, 0x981, 0x947, 0x918
	opHGMMA, opHGMMAHeld                          = 0x9f0, 0xdf0 // Held: one operand in registers
)

// products counts the products on tensor cores.
func products(code []instruction) int {
	return count(code, opHMMA) + count(code, opHGMMA) + count(code, opHGMMAHeld)
}

func counted(code []instruction) instructions {
	return instructions{len(code), products(code), count(code, opLDSM), count(code, opLDGSTS), count(code, opLDG)}
}

// innerLoop returns the innermost loop with most products on tensor cores or, without any, most
// loads from global memory; nil if there is no such loop. A loop is a range that ends with a branch
// to its start.
func innerLoop(code []instruction) (loop []instruction) {
	type span struct{ lo, hi int }
	var loops []span
	for at, i := range code {
		if to, branch := i.target(at); branch && to >= 0 && to < at {
			loops = append(loops, span{to, at + 1})
		}
	}
	work := func(n instructions) int {
		if cores := products(code) > 0; cores {
			return n.hmma
		}
		return n.ldg
	}
	var best instructions
	for _, l := range loops {
		n := counted(code[l.lo:l.hi])
		inner := !slices.ContainsFunc(loops, func(m span) bool {
			return m != l && m.lo >= l.lo && m.hi <= l.hi && work(counted(code[m.lo:m.hi])) > 0
		})
		if inner && (work(n) > work(best) || work(n) > 0 && work(n) == work(best) && n.all < best.all) {
			best, loop = n, code[l.lo:l.hi]
		}
	}
	return loop
}

// kernelsOfObject returns the kernels of an object file that nvcc built without compression, by
// their symbols. It fails unless they are for one GPU, sm_90a.
func kernelsOfObject(t *testing.T, path string) map[string]*machineCode {
	t.Helper()
	file, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	section := file.Section(".nv_fatbin")
	if section == nil {
		return nil
	}
	fat, err := section.Data()
	if err != nil {
		t.Fatal(err)
	}
	kernels := map[string]*machineCode{}
	for at := bytes.Index(fat, []byte(elf.ELFMAG)); at >= 0; {
		gpu, err := elf.NewFile(bytes.NewReader(fat[at:]))
		if err == nil && gpu.Machine == 190 { // EM_CUDA
			addKernels(t, gpu, kernels)
		}
		next := bytes.Index(fat[at+1:], []byte(elf.ELFMAG))
		if next < 0 {
			break
		}
		at += 1 + next
	}
	addUse(t, path+".ptxas", kernels)
	return kernels
}

func addKernels(t *testing.T, gpu *elf.File, to map[string]*machineCode) {
	t.Helper()
	for _, s := range gpu.Sections {
		symbol, kernel := strings.CutPrefix(s.Name, ".text.")
		if !kernel {
			continue
		}
		raw, err := s.Data()
		if err != nil || to[symbol] != nil {
			t.Fatalf("%s: %v, or built for two GPUs: build with ARCHS=90", symbol, err)
		}
		var code []instruction
		for ; len(raw) >= 16; raw = raw[16:] {
			code = append(code, instruction{binary.LittleEndian.Uint64(raw), binary.LittleEndian.Uint64(raw[8:])})
		}
		for len(code) > 0 && code[len(code)-1].is(opNOP) { // padding
			code = code[:len(code)-1]
		}
		loop := innerLoop(code)
		to[symbol] = &machineCode{whole: counted(code), loop: counted(loop), step: oneStep(loop),
			most: mostThreads(t, gpu, symbol)}
	}
}

// mostThreads returns how many threads a block of a kernel may have: 1024 if the sources do not
// limit them. The limit is an attribute in the kernel's section .nv.info, which consists of a
// format, a number and, in format 4, a length and bytes.
func mostThreads(t *testing.T, gpu *elf.File, symbol string) int64 {
	t.Helper()
	const withBytes, maxThreads = 4, 5
	section := gpu.Section(".nv.info." + symbol)
	if section == nil {
		t.Fatalf("%s has no attributes", symbol)
	}
	info, err := section.Data()
	if err != nil {
		t.Fatal(err)
	}
	for len(info) >= 4 {
		format, number, n := info[0], info[1], 0
		if format == withBytes {
			n = int(binary.LittleEndian.Uint16(info[2:]))
		}
		if format == withBytes && number == maxThreads {
			return int64(binary.LittleEndian.Uint32(info[4:])) // of x; y and z are 1
		}
		info = info[4+n:]
	}
	return 1024
}

// refusal returns why a GPU of compute capability 9.0 would refuse a launch, which the emulated GPU
// cannot know; "" if it would not. Up to 48 KiB of dynamic shared memory, the plug-in may not have
// asked for a higher limit, which holds for all shared memory of a block.
func (k *machineCode) refusal(s shapeOf) string {
	const usual, highest = 48 << 10, 227 << 10
	shared := s.shared + k.static
	switch {
	case s.threads > k.most:
		return fmt.Sprintf("%d threads, more than the %d of __launch_bounds__", s.threads, k.most)
	case shared > highest || s.shared <= usual && shared > usual:
		return fmt.Sprintf("%d bytes of dynamic and %d of static shared memory", s.shared, k.static)
	case resident(k.registers, s.threads, shared) == 0:
		return fmt.Sprintf("%d registers for each of %d threads", k.registers, s.threads)
	}
	return ""
}

// TestRefusals: launches at the limits, and above them.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		kernel machineCode
		shape  shapeOf
		want   string
	}{{machineCode{registers: 255, most: 256}, shapeOf{256, 227 << 10}, ""},
		{machineCode{registers: 64, most: 1024}, shapeOf{1024, 0}, ""},
		{machineCode{registers: 32, most: 128}, shapeOf{256, 0}, "__launch_bounds__"},
		{machineCode{registers: 72, most: 1024}, shapeOf{1024, 0}, "72 registers"},
		{machineCode{registers: 32, static: 1024, most: 256}, shapeOf{256, 47 << 10}, ""},
		{machineCode{registers: 32, static: 1024, most: 256}, shapeOf{256, 48 << 10}, "1024 of static"},
		{machineCode{registers: 32, static: 1024, most: 256}, shapeOf{256, 226 << 10}, ""},
		{machineCode{registers: 32, static: 1024, most: 256}, shapeOf{256, 227 << 10}, "1024 of static"}} {
		if found := c.kernel.refusal(c.shape); !strings.Contains(found, c.want) || (found == "") != (c.want == "") {
			t.Errorf("%+v, %+v: %q, want %q", c.kernel, c.shape, found, c.want)
		}
	}
}

var (
	registersUsed = regexp.MustCompile(`Used (\d+) registers`)
	sharedUsed    = regexp.MustCompile(`(\d+) bytes smem`)
)

// addUse reads the assembler's output about registers, shared memory and spills.
func addUse(t *testing.T, path string, to map[string]*machineCode) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var now *machineCode
	number := func(s string) int64 { n, _ := strconv.ParseInt(s, 10, 64); return n }
	for line := range strings.Lines(string(text)) {
		if m := entry.FindStringSubmatch(line); m != nil {
			now = to[m[1]]
		}
		if now == nil {
			continue
		}
		if m := frame.FindStringSubmatch(line); m != nil {
			now.spilled = number(m[1]) + number(m[2]) + number(m[3])
		}
		if m := registersUsed.FindStringSubmatch(line); m != nil {
			now.registers = number(m[1])
		}
		if m := sharedUsed.FindStringSubmatch(line); m != nil {
			now.static = number(m[1])
		}
	}
	for symbol, k := range to {
		if k.registers == 0 {
			t.Fatalf("%s has no registers of %s", path, symbol)
		}
	}
}

// resident returns how many blocks run on a multiprocessor of compute capability 9.0 at once: 64
// warps, 32 blocks, 65,536 registers given to warps in units of 256, and 228 KiB of shared memory,
// of which each block takes 1 KiB more than it asks for (CUDA C++ Programming Guide, "Compute
// Capabilities").
func resident(registers, threads, shared int64) int64 {
	warps := (threads + 31) / 32
	each := (registers*32 + 255) / 256 * 256
	byRegisters := 65536 / each / warps
	byShared := (228 << 10) / ((shared + 1024 + 127) / 128 * 128)
	return min(32, 64/warps, byRegisters, byShared)
}

// demangled returns short names of kernels: without namespaces and arguments.
func demangled(t *testing.T, symbols []string) map[string]string {
	t.Helper()
	c := exec.Command(need.Tool(t, "c++filt", "install binutils"))
	c.Stdin = strings.NewReader(strings.Join(symbols, "\n"))
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]string{}
	for i, name := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		name = strings.NewReplacer("(anonymous namespace)::", "", "__nv_bfloat16", "bf16", "(bool)1", "true", "(bool)0",
			"false", "(int)", "").Replace(name)
		name = strings.TrimPrefix(name, "void ")
		depth := 0
		for at, r := range name {
			if r == '<' {
				depth++
			} else if r == '>' {
				depth--
			} else if r == '(' && depth == 0 {
				name = name[:at]
				break
			}
		}
		names[symbols[i]] = name
	}
	return names
}

// A shapeOf is how a kernel is launched for Llama-8B's shape.
type shapeOf struct{ threads, shared int64 }

// launchShapes returns by the kernels' names how operations launch them on 32K tokens.
func launchShapes(t *testing.T) map[string][]shapeOf {
	x := newShaped(t, needEmulated(t), 32768, false)
	bySymbol := map[string][]shapeOf{}
	calls := slices.Collect(maps.Values(x.operations(4096, 32, 64, 128, 256)))
	for _, dim := range []int64{64, 128, 256} { // with options of scores
		forward, backward := x.attentionWith(32, 8, dim, func(a *device.Attention) { a.Softcap = 30 })
		calls = append(calls, forward, backward)
	}
	add := func(x *shaped, call func() error) {
		for _, l := range x.launches(call) {
			if s := (shapeOf{l.threads, l.shared}); !slices.Contains(bySymbol[l.symbol], s) {
				bySymbol[l.symbol] = append(bySymbol[l.symbol], s)
			}
		}
	}
	for _, call := range calls {
		add(x, call)
	}
	hopper := newShapedOf(t, needEmulated(t), 32768, false, "attention_forward=wgmma,attention_backward=wgmma")
	for _, dim := range []int64{64, 128, 256} {
		forward, backward := hopper.attentionWith(32, 8, dim, func(*device.Attention) {})
		if add(hopper, forward); dim <= 128 {
			add(hopper, backward)
		}
	}
	names := demangled(t, slices.Collect(maps.Keys(bySymbol)))
	shapes := map[string][]shapeOf{}
	for symbol, s := range bySymbol {
		slices.SortFunc(s, func(a, b shapeOf) int {
			return cmp.Or(cmp.Compare(a.threads, b.threads), cmp.Compare(a.shared, b.shared))
		})
		shapes[names[symbol]] = s
	}
	return shapes
}

// upToDate reports whether an object exists and is newer than the files that it was compiled from.
func upToDate(object string) bool {
	built, err := os.Stat(object)
	if err != nil {
		return false
	}
	depends, err := os.ReadFile(strings.TrimSuffix(object, ".o") + ".d")
	if err != nil {
		return false
	}
	rule, _, _ := strings.Cut(string(depends), "\n\n")
	_, files, _ := strings.Cut(strings.ReplaceAll(rule, "\\\n", " "), ":")
	for _, f := range strings.Fields(files) {
		if strings.HasSuffix(f, ":") { // the rules without prerequisites that -MP adds
			break
		}
		if !filepath.IsAbs(f) {
			f = filepath.Join("..", f)
		}
		if s, err := os.Stat(f); err != nil || s.ModTime().After(built.ModTime()) {
			return false
		}
	}
	return true
}

const kernelsHead = `| kernel | registers | threads | shared KiB | blocks an SM | spilled | HMMA | LDSM | LDGSTS | loop: instructions | HMMA | LDSM | LDGSTS | LDG |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
`

// kernelsTable returns the table of an object, "" if none of its kernels is launched.
func kernelsTable(t *testing.T, object string, shapes map[string][]shapeOf, seen map[string]bool) string {
	t.Helper()
	kernels := kernelsOfObject(t, object)
	names := demangled(t, slices.Collect(maps.Keys(kernels)))
	rows := []string{}
	for symbol, k := range kernels {
		name := names[symbol]
		seen[name] = true
		for _, s := range shapes[name] {
			shared := s.shared + k.static
			if why := k.refusal(s); why != "" {
				t.Errorf("%s: a GPU would refuse the launch: %s", name, why)
			}
			rows = append(rows,
				fmt.Sprintf("| `%s` | %d | %d | %.1f | %d | %d | %d | %d | %d | %d | %d | %d | %d | %d |\n", name,
					k.registers, s.threads, float64(shared)/1024, resident(k.registers, s.threads, shared), k.spilled,
					k.whole.hmma, k.whole.ldsm, k.whole.cp, k.loop.all, k.loop.hmma, k.loop.ldsm, k.loop.cp,
					k.loop.ldg))
		}
	}
	if len(rows) == 0 {
		return ""
	}
	slices.Sort(rows)
	return kernelsHead + strings.Join(rows, "") + stepsTable(kernels, names)
}

// TestMachineCode compares the tables of docs/gpu-kernels.md with the objects that nvcc has built.
// Objects that are not up to date are not compared, and the test says which; in CI it fails. make
// cuda-table writes the tables.
func TestMachineCode(t *testing.T) {
	sources, err := filepath.Glob("plugin/kernels/*.cu")
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	page, err := os.ReadFile(kernelsPage)
	if err != nil {
		t.Fatal(err)
	}
	head, tables, _ := strings.Cut(string(page), "\n## ")
	written := map[string]string{}
	for section := range strings.SplitSeq("\n## "+tables, "\n## ") {
		if name, table, ok := strings.Cut(section, "\n\n"); ok {
			written[name] = strings.TrimSpace(table) + "\n"
		}
	}
	shapes, seen := launchShapes(t), map[string]bool{}
	var missing []string
	now := map[string]string{}
	for _, source := range sources {
		name := filepath.Base(source)
		object := "../build/cuda/real/kernels/" + name + ".o"
		if !upToDate(object) {
			missing = append(missing, name)
			now[name] = written[name]
			continue
		}
		now[name] = kernelsTable(t, object, shapes, seen)
		if now[name] != written[name] && !*update {
			t.Errorf("%s: the machine code differs from %s; if that is intended, run make cuda-table KERNELS=%s\nthe page has\n%s\nthe machine code has\n%s",
				name, kernelsPage,
				strings.TrimSuffix(name, ".cu"), written[name], now[name])
		}
	}
	if len(missing) == 0 {
		for name := range shapes {
			if !seen[name] {
				t.Errorf("%s is launched on the emulated device and has no machine code", name)
			}
		}
	}
	if *update {
		text := head
		for _, name := range slices.Sorted(maps.Keys(now)) {
			if now[name] != "" {
				text += "\n## " + name + "\n\n" + now[name]
			}
		}
		if err := os.WriteFile(kernelsPage, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if len(missing) > 0 {
		need.Missing(t, "no machine code of "+strings.Join(missing, ", ")+" that is up to date", "run make cuda")
	}
}
