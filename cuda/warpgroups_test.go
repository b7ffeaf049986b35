package cuda

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/need"
)

// TestWarpgroupRefusals: calls that the kernels do not support fail with the reason, also if
// another kernel would support them, because a name selects the kernel.
func TestWarpgroupRefusals(t *testing.T) {
	cudatest.Use(t)
	if d, _, _ := opened(t, Options{}); d.Details().SM != 90 {
		t.Skip("SKIPPED: products of warpgroups need a GPU of compute capability 9.0")
	}
	pinned := "attention_forward=wgmma,attention_backward=wgmma"
	for _, c := range []attentionRefusal{
		{tensor.F32, 64, 64, 0.1, "BF16"},
		{tensor.BF16, 24, 64, 0.1, "multiple of 16"},
		{tensor.BF16, 64, 272, 0.1, "at most 256"},
		{tensor.BF16, 64, 64, -0.1, "scale"},
		{tensor.BF16, 144, 64, 0.1, "up to 128"}, // backward
	} {
		c.check(t, pinned)
	}
	if _, err := attentionDQ(t, pinned, tensor.BF16, 128, 128, 0.1); err != nil {
		t.Error(err)
	}
	x := newShapedOf(t, needEmulated(t), 64, true, pinned)
	forward, backward := x.attentionWith(2, 1, 64, func(a *device.Attention) { a.Softcap = 30 })
	for op, call := range map[string]func() error{"forward": forward, "backward": backward} {
		if err := call(); status.Of(err) != status.Unsupported || !strings.Contains(err.Error(), "soft caps") {
			t.Errorf("%s with a soft cap: %v", op, err)
		}
	}
}

// warpgroupProducts has the products of warpgroups in the kernels of attention for Hopper, by parts
// of their symbols: of a tile, and of the tiles before and after the loop.
var warpgroupProducts = map[string]int{
	"attention_wgmma_forward_kernelILi0": 24, "attention_wgmma_forward_kernelILi1": 32,
	"attention_wgmma_forward_kernelILi2": 40,
	"attention_wgmma_dq_kernelILi0":      24, "attention_wgmma_dq_kernelILi1": 40,
	"attention_wgmma_dkv_kernelILi0": 16, "attention_wgmma_dkv_kernelILi1": 24,
	"attention_wgmma_delta_kernelILi0": 4, "attention_wgmma_delta_kernelILi1": 8,
}

// TestWarpgroupProducts: the kernels have these products and no others on tensor cores, the
// assembler has not serialized them, and it has not ignored the division of the registers.
func TestWarpgroupProducts(t *testing.T) {
	found := 0
	kernelsBuilt(t, func(symbol string, code []instruction) {
		for part, want := range warpgroupProducts {
			if !strings.Contains(symbol, part) {
				continue
			}
			n := products(code)
			if n == 0 { // built for another GPU
				continue
			}
			found++
			if n != want || count(code, opHMMA) > 0 {
				t.Errorf("%s: %d products, %d of them of warps; want %d of warpgroups", symbol, n,
					count(code, opHMMA), want)
			}
		}
	})
	if want := len(warpgroupProducts) + 3; found != want { // forward kernels twice, also for a softmax that has begun
		t.Errorf("%d kernels, want %d", found, want)
	}
	text, err := os.ReadFile("../build/cuda/ptxas.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "serialized") || strings.Contains(line, "setmaxnreg") {
			t.Error(strings.TrimSpace(line))
		}
	}
}

var registers = regexp.MustCompile(`%(?:f|r|rd)\d+`)

// TestProductsAreFenced: in the compiler's output, nothing writes a register of a product between
// wgmma.fence and the end of the product's group. The compiler may move such a write over the
// fence, and the hardware does not wait for it. Neither the emulator nor the interpreter of
// instructions sees that.
func TestProductsAreFenced(t *testing.T) {
	text, err := os.ReadFile(need.File(t, "../build/cuda/ptx/kernels/attention_wgmma.ptx", "run make cuda"))
	if err != nil {
		t.Fatal(err)
	}
	var used, written []string // registers between a fence and the end of the group
	fenced, products := false, 0
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		switch found := registers.FindAllString(line, -1); {
		case strings.HasPrefix(line, "wgmma.fence."):
			fenced, used, written = true, nil, nil
		case strings.Contains(line, "wgmma.mma_async."):
			if products++; !fenced {
				t.Errorf("a product without a fence: %s", line)
			}
			_, operands, _ := strings.Cut(line, "wgmma.mma_async.")
			used = append(used, registers.FindAllString(operands, -1)...)
		case strings.HasPrefix(line, "wgmma.commit_group."):
			for _, r := range written {
				if slices.Contains(used, r) && !strings.HasPrefix(r, "%rd") { // descriptors are read at issue
					t.Errorf("%s is written between a fence and its product", r)
				}
			}
			fenced = false
		case fenced && (strings.HasPrefix(line, "$") || strings.HasPrefix(line, "bra")):
			t.Errorf("a branch between a fence and the end of a group: %s", line)
		case fenced && len(found) > 0:
			written = append(written, found[0])
		}
	}
	if products < 100 {
		t.Errorf("%d products", products)
	}
}
