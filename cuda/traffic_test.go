package cuda

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/need"
)

// trafficFile names the emulator's file of counts (plugin/emulated/ptx/traffic.h).
const trafficFile = "ULYSSES_EMULATED_TRAFFIC"

// traffic is the sum of the counts of a kernel, or of an instruction.
type traffic struct{ runs, passes, leastPasses, sectors, leastSectors int64 }

func (c *traffic) add(o traffic) {
	c.runs, c.passes, c.leastPasses = c.runs+o.runs, c.passes+o.passes, c.leastPasses+o.leastPasses
	c.sectors, c.leastSectors = c.sectors+o.sectors, c.leastSectors+o.leastSectors
}

// excess returns by how much passes and sectors exceed the least.
func (c *traffic) excess() (passes, sectors float64) {
	return float64(c.passes)/float64(max(1, c.leastPasses)) - 1, float64(c.sectors)/float64(max(1, c.leastSectors)) - 1
}

// mostExcess is the limit for a kernel without an entry in excessAllowed.
const mostExcess = 0.05

// excessAllowed has kernels whose accesses to shared memory or to device memory may take more than
// the least, by the start of their names.
var excessAllowed = map[string]struct {
	passes, sectors float64
	why             string
}{
	"attention_delta":      {0, 1, "a thread sums a row of its own in order; the L1 cache has the rest of a sector"},
	"attention_mma_delta":  {0, 1, "the order of the products for dP; the L1 cache has the rest of a sector"},
	"attention_dkv_kernel": {0, 0.7, "sums over the query heads of a key head, by single elements"},
	"conv_forward":         {0, 1, "the weights, once a block"},
	"conv_backward":        {0, 1, "the weights, once a block"},
	"delta_prepare_kernel": {0.1, 0.3, "T is rounded from F32, 32 bytes a lane; gates"},
	"delta_scan_tiles":     {0.05, 0.4, "half a sector at once: an exchange between lanes takes up to 10 % more clocks"},
	"delta_scan_back":      {0.1, 0.25, "the same; in F32, tiles with factors, by single elements"},
	"delta_scan_f32":       {0.1, 0.05, "tiles with factors, by single elements"},
	"rope_units":           {0, 0.3, "cos and sin of eight features; the L1 cache has the rest of a sector"},
	"moves_kernel":         {0, 0.3, "as rope_units"},
	"route_backward":       {0, 0.2, "two experts a token"},
	"tables_put":           {0, 1, "a table of a few bytes"},
}

// TestTraffic counts the accesses to memory of the PTX instructions of the GPU build, which the
// emulated plug-in interprets, for operations of models: shared memory without bank conflicts,
// device memory in whole sectors. It needs make cuda.
func TestTraffic(t *testing.T) {
	plugin := needEmulated(t)
	if os.Getenv(trafficFile) != "" {
		runForTraffic(t, plugin)
		return
	}
	folder, err := filepath.Abs(need.File(t, "../build/cuda/ptx/kernels", "run make cuda"))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "traffic")
	c := exec.Command(os.Args[0], "-test.run", "^TestTraffic$")
	c.Env = append(os.Environ(), trafficFile+"="+file, "ULYSSES_EMULATED_PTX="+folder, "ULYSSES_CUDA_PLUGIN="+plugin)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out[max(0, len(out)-1<<14):])
	}
	kernels, worst := readTraffic(t, file)
	names := demangled(t, slices.Collect(maps.Keys(kernels)))
	unused := maps.Clone(excessAllowed)
	for _, symbol := range slices.SortedFunc(maps.Keys(kernels),
		func(a, b string) int { return strings.Compare(names[a], names[b]) }) {
		k, name := kernels[symbol], names[symbol]
		passes, sectors := k.excess()
		t.Logf("%-50s %9d instructions, shared %8d · %.3f, sectors %8d · %.3f", name, k.runs, k.leastPasses, 1+passes,
			k.leastSectors, 1+sectors)
		allowed := excessAllowed[""]
		for start, a := range excessAllowed {
			if strings.HasPrefix(name, start) {
				allowed = a
				if passes > mostExcess || sectors > mostExcess {
					delete(unused, start)
				}
			}
		}
		if !(passes <= max(mostExcess, allowed.passes) && sectors <= max(mostExcess, allowed.sectors)) {
			t.Errorf("%s: accesses to shared memory take %.2f times the least, to device memory %.2f times; most at line %s",
				name, 1+passes, 1+sectors, worst[symbol])
		}
	}
	if len(kernels) < 50 {
		t.Errorf("%d kernels ran, not 50 or more", len(kernels))
	}
	for start := range unused {
		t.Errorf("no kernel %s exceeds the limit: remove it from excessAllowed", start)
	}
}

// runForTraffic runs operations of models in BF16 and in F32, attention with each of its kernels.
func runForTraffic(t *testing.T, plugin string) {
	run := func(x *shaped, calls ...func() error) {
		for _, call := range append(calls, x.s.Sync) {
			if err := call(); err != nil {
				t.Fatal(err)
			}
		}
	}
	const tokens, hidden, heads = 256, 512, 4
	x := newShaped(t, plugin, tokens, true)
	run(x, slices.Collect(maps.Values(x.operations(hidden, heads, 64, 128, 256)))...)
	for _, dim := range []int64{64, 128, 256} {
		forward, backward := x.attentionWith(heads, heads/2, dim, func(a *device.Attention) { a.Softcap = 30 })
		run(x, forward, backward)
	}
	hopper := newShapedOf(t, plugin, tokens, true, "attention_forward=wgmma,attention_backward=wgmma")
	for _, dim := range []int64{64, 128} {
		forward, backward := hopper.attention(heads, heads/2, dim)
		run(hopper, forward, backward)
	}
	exact := newShapedOf(t, plugin, tokens/2, true, "")
	exact.dtype = tensor.F32
	run(exact, slices.Collect(maps.Values(exact.operations(hidden/2, heads, 64, 128)))...)
}

// readTraffic returns the counts of the kernels by their symbols, and the line and instruction of
// each whose accesses exceed the least by most.
func readTraffic(t *testing.T, path string) (kernels map[string]*traffic, worst map[string]string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	kernels, worst = map[string]*traffic{}, map[string]string{}
	most := map[string]int64{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Split(lines.Text(), "\t")
		if len(fields) != 10 {
			t.Fatalf("%d fields in %q", len(fields), lines.Text())
		}
		symbol, line, instruction := fields[1], fields[2], fields[4]
		var c traffic
		if _, err := fmt.Sscan(strings.Join(fields[5:], " "), &c.runs, &c.passes, &c.leastPasses, &c.sectors,
			&c.leastSectors); err != nil {
			t.Fatal(err)
		}
		if kernels[symbol] == nil {
			kernels[symbol] = &traffic{}
		}
		kernels[symbol].add(c)
		if more := c.passes - c.leastPasses + c.sectors - c.leastSectors; more > most[symbol] {
			most[symbol], worst[symbol] = more, line+" ("+instruction+")"
		}
	}
	return kernels, worst
}
