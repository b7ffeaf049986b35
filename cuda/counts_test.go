package cuda

import (
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"ulysses/device"
	"ulysses/tensor"
)

// sums are the counts of a call's launches.
type sums struct{ launches, multiplyAdds, bytesIn, bytesOut int64 }

func sum(all []launch) (s sums) {
	for _, l := range all {
		s.launches++
		s.multiplyAdds += l.multiplyAdds
		s.bytesIn += l.bytesIn
		s.bytesOut += l.bytesOut
	}
	return s
}

// TestCounts counts the multiply-adds and the bytes of device memory of all operations while they
// run on the emulated GPU, whose panels of the gated delta rule are short. Each further 128 tokens
// must cost the same: a pass that began again with each panel would cost more with each.
// Attention's multiply-adds are quadratic, and its bytes read at most.
func TestCounts(t *testing.T) {
	path := countingPlugin(t)
	const step, lengths = 128, 4
	counted := map[string][]sums{}
	for n := int64(1); n <= lengths; n++ {
		x := newShaped(t, path, n*step, true)
		calls := x.operations(256, 2, 64)
		for name, call := range calls {
			if n < lengths || strings.HasPrefix(name, "attention") {
				counted[name] = append(counted[name], sum(x.launches(call)))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(counted)) {
		at := counted[name]
		last, before := at[len(at)-1], at[len(at)-2]
		t.Logf("%-28s %9d multiply-adds a token, %6d bytes read, %6d written", name,
			(last.multiplyAdds-before.multiplyAdds)/step, (last.bytesIn-before.bytesIn)/step,
			(last.bytesOut-before.bytesOut)/step)
		for what, of := range map[string]func(s sums) int64{"multiply-adds": func(s sums) int64 {
			return s.multiplyAdds
		}, "bytes read": func(s sums) int64 { return s.bytesIn },
			"bytes written": func(s sums) int64 { return s.bytesOut }} {
			var counts []int64
			for _, s := range at {
				counts = append(counts, of(s))
			}
			if strings.HasPrefix(name, "attention") && what != "bytes written" {
				if c := differences(differences(differences(counts)))[0]; c != 0 && what == "multiply-adds" ||
					c > counts[0]/2 {
					t.Errorf("%s: %s at lengths with a step of %d: %d; want a quadratic polynomial", name, what,
						step, counts)
				}
				continue
			}
			if d := differences(counts); float64(d[1]) > 1.02*float64(d[0]) {
				t.Errorf("%s: %s at lengths with a step of %d: %d; want the same for each step", name, what,
					step, counts)
			}
		}
	}
}

// countingPlugin builds the emulated plug-in that counts multiply-adds, and returns its path.
func countingPlugin(t *testing.T) string {
	needEmulated(t)
	if out, err := exec.Command("make", "-s", "-C", "..", "cuda-races-build").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return "../build/cuda/races/libulysses_cuda_emulated.so"
}

// TestHiddenTilesAreSkipped: attention multiplies only the tiles that the block mask shows, forward
// and backward. Under a mask of the diagonal blocks, 8 of the 64 blocks are seen: by a tile of 128
// queries, 2 of 8 columns.
func TestHiddenTilesAreSkipped(t *testing.T) {
	const tokens, block = 512, 64
	x := newShaped(t, countingPlugin(t), tokens, true)
	counted := func(shows func(row, column int) bool) (forward, backward int64) {
		mask := make([]uint8, 64)
		for i := range mask {
			if shows(i/8, i%8) {
				mask[i] = 1
			}
		}
		onDevice := x.alloc(tensor.U8, 1, 8, 8)
		if err := x.d.Copy(x.s, onDevice, tensor.Of(unsafe.Pointer(&mask[0]), tensor.U8, 1, 8, 8)); err != nil {
			t.Fatal(err)
		}
		f, b := x.attentionWith(2, 1, 64, func(a *device.Attention) {
			a.Causal, a.BlockMask = false, onDevice
			a.QuerySeq, a.KeySeq, a.BlockRows, a.BlockColumns = tokens, tokens, block, block
		})
		return sum(x.launches(f)).multiplyAdds, sum(x.launches(b)).multiplyAdds
	}
	all, allBack := counted(func(int, int) bool { return true })
	some, someBack := counted(func(row, column int) bool { return row == column })
	none, noneBack := counted(func(int, int) bool { return false })
	t.Logf("multiply-adds forward: %d, on the diagonal %d, without keys %d; backward %d, %d, %d", all, some, none,
		allBack, someBack, noneBack)
	if !(some-none <= (all-none)/4 && some > none && someBack-noneBack <= (allBack-noneBack)/4 && someBack > noneBack) {
		t.Error("hidden tiles are multiplied")
	}
}

// differences returns the differences between neighbours.
func differences(x []int64) (d []int64) {
	for i := range len(x) - 1 {
		d = append(d, x[i+1]-x[i])
	}
	return d
}

// TestLaunches counts the launches of a call with the limits of a GPU. On few tokens, no operation
// launches a kernel twice except for the fold of partial sums, so it passes once over its operands.
// At 32 heads of 128, the launches of operations in panels grow at most with the length, and the
// launches of other operations do not depend on it.
func TestLaunches(t *testing.T) {
	path := needEmulated(t)
	x := newShaped(t, path, 4096, false)
	for name, call := range x.operations(512, 4, 64, 128, 256) {
		times := map[string]int{}
		for _, l := range x.launches(call) {
			if times[l.symbol]++; times[l.symbol] > 1 && !strings.Contains(l.symbol, "column_fold") {
				t.Errorf("%s on 4096 tokens launches %s more than once", name, l.name)
			}
		}
	}
	counted := map[string][]int64{}
	for _, tokens := range []int64{16 << 10, 32 << 10, 128 << 10} {
		x := newShaped(t, path, tokens, false)
		for name, call := range x.operations(4096, 32, 128) {
			counted[name] = append(counted[name], sum(x.launches(call)).launches)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(counted)) {
		n := counted[name]
		t.Logf("%-28s %3d launches at 16K tokens, %3d at 32K, %3d at 128K", name, n[0], n[1], n[2])
		if panels := strings.HasPrefix(name, "delta rule") || name == "conv1d backward"; panels &&
			(n[1] > 2*n[0] || n[2] > 4*n[1]) || !panels && (n[1] != n[0] || n[2] != n[0]) {
			t.Errorf("%s: %d launches", name, n)
		}
	}
}
