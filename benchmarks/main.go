// Command ulysses-bench times this project's operations on the shapes of cases.json. It prints one
// JSON line for each case, in the format of the programs under peers/; run.py compares the two.
//
//	ulysses-bench peak|attention|gemm|gdn [flags]
//	ulysses-bench gdn_ranks|ulysses|a2a|overlap|levels [flags]
//	ulysses-bench gpu_attention|gpu_layer|gpu_ops|gpu_host|gpu_delta|gpu_loss|gpu_hybrid [flags]
//
// ulysses-bench SUITE -h lists the flags. gdn_ranks, ulysses, a2a, overlap, levels and gpu_layer
// run on the ranks that mpirun started, or on --ranks goroutine ranks; the other suites run on one
// rank. The flags --link-* slow the links between goroutine ranks down, as on a network
// (testkit/slowlinks).
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	_ "embed"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/internal/status"
	"ulysses/slurm"
	"ulysses/tensor"
	"ulysses/testkit/slowlinks"
)

//go:embed cases.json
var casesJSON []byte

// shape is one case of cases.json. Each suite uses some of the fields.
type shape struct {
	Name    string
	Tokens  int64
	HeadDim int64 `json:"head_dim"`
	Heads   int64
	KVHeads int64 `json:"kv_heads"`
	// key head of each query head, for a rank whose shard of heads ends inside a group
	KVHead    []int64 `json:"kv_head"`
	Causal    bool
	CuSeqlens []int64 `json:"cu_seqlens"`
	// masks: keys before a query, with its own; blocks (i, j) of a mask with (i + j) % Every = 0,
	// and the diagonal; a soft cap; a slope of ALiBi for each head; a sink for each head
	Window         int64
	Block, Every   int64
	Softcap, Slope float64
	Deterministic  bool
	Sinks          bool
	Batch          int64
	M, K, N        int64
	Form           string // nn, nt, tn: which operand of the matrix product is stored transposed
	Hidden         int64  // features of a layer
	FFN            int64  // features inside the MLP
	Vocab          int64  // rows of the head's matrix
	// the layer has linear attention: Heads are value heads, KVHeads key heads
	Linear bool
}

type cases struct {
	Attention, Gemm, Ulysses []shape
	Masks                    []shape
	GDN                      []shape
	GDNRanks                 []shape `json:"gdn_ranks"`
	AllToAll                 []int64 `json:"alltoall_bytes"`
	GPUAttention             []shape `json:"gpu_attention"`
	GPUMasks                 []shape `json:"gpu_masks"`
	GPUWgmma                 []shape `json:"gpu_wgmma"`
	GPULayer                 []shape `json:"gpu_layer"`
	GPUDelta                 []shape `json:"gpu_delta"`
	GPULoss                  []shape `json:"gpu_loss"`
	GPUHybrid                []shape `json:"gpu_hybrid"`
}

// options are the flags and the cases. The flags are described in run.
type options struct {
	threads, repeat, ranks int
	nodes                  int
	ring                   int64
	overlapped             bool // projections overlap with all-to-alls
	words, device, comm    string
	warm, longest          time.Duration
	compute                tensor.DType // F32 or BF16
	forward                bool
	expected               bool // measure nothing
	cases                  cases
	links                  slowlinks.Links
	world                  comm.Comm // nil in suites that run on one rank
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "ulysses-bench:", err)
		os.Exit(int(status.Of(err)))
	}
}

func run(args []string) error {
	benches := map[string]func(*options) error{"peak": peak, "attention": attention, "masks": masks, "gemm": gemm,
		"gdn": gdn, "gdn_ranks": gdnRanks, "ulysses": ulysses, "a2a": allToAll, "overlap": overlap,
		"layer_overlap": layerOverlap, "levels": levels,
		"gpu_attention": gpuAttention, "gpu_masks": gpuMasks, "gpu_wgmma": gpuWgmma, "gpu_layer": gpuLayer,
		"gpu_ops": gpuOps, "gpu_host": gpuHost, "gpu_delta": gpuDelta, "gpu_loss": gpuLoss, "gpu_hybrid": gpuHybrid}
	if len(args) == 0 || benches[args[0]] == nil {
		return status.Errorf(status.InvalidArgument, "usage: ulysses-bench %s [flags]",
			strings.Join(slices.Sorted(maps.Keys(benches)), "|"))
	}
	o := &options{}
	f := flag.NewFlagSet(args[0], flag.ContinueOnError)
	f.IntVar(&o.threads, "threads", 2, "CPU threads of a rank")
	f.IntVar(&o.repeat, "repeat", 7, "timed repetitions of a case")
	f.IntVar(&o.ranks, "ranks", 1, "number of goroutine ranks, if no launcher started ranks")
	f.StringVar(&o.device, "device", "cuda", "device of the gpu suites")
	f.StringVar(&o.comm, "comm", "auto", "transport between the GPUs of ranks: auto, nccl, ipc, mpi or local")
	f.DurationVar(&o.warm, "warm", time.Second/2, "time that a case of the gpu suites runs before it is timed")
	f.DurationVar(&o.longest, "longest", 0, "time that the calls of a case of the gpu suites may take; 0 = no limit")
	dtype := f.String("dtype", "",
		"compute type: f32 or bf16; the default is bf16 in the gpu suites, f32 in the others")
	f.StringVar(&o.words, "cases", "", "run only cases whose name contains one of these words, separated by commas")
	f.IntVar(&o.nodes, "nodes", 1,
		"virtual nodes of the goroutine ranks; the flags of the links are for messages between nodes")
	f.DurationVar(&o.links.Latency, "link-latency", 0, "latency of a message between goroutine ranks")
	f.DurationVar(&o.links.Overhead, "link-overhead", 0,
		"time for which a message occupies the link in addition to its bytes")
	f.Float64Var(&o.links.Bandwidth, "link-bandwidth", 0, "bytes a second that a goroutine rank sends")
	f.Int64Var(&o.ring, "ring", 1, "groups of ranks in the ring of the suite ulysses")
	f.BoolVar(&o.expected, "expected", false,
		"call each operation of the gpu suites once and print its bytes and FLOP; all times are 0")
	f.BoolVar(&o.forward, "forward", false, "time the forward pass of attention separately as well")
	if err := f.Parse(args[1:]); err != nil {
		return status.Errorf(status.InvalidArgument, "%w", err)
	}
	switch o.compute = tensor.ParseDType(strings.ToUpper(*dtype)); {
	case *dtype == "" && strings.HasPrefix(args[0], "gpu_"):
		o.compute = tensor.BF16
	case *dtype == "":
		o.compute = tensor.F32
	case o.compute != tensor.F32 && o.compute != tensor.BF16:
		return status.Errorf(status.InvalidArgument, "--dtype %s: the type is unknown; give f32 or bf16", *dtype)
	}
	if err := json.Unmarshal(casesJSON, &o.cases); err != nil {
		return status.Errorf(status.Internal, "cases.json: %w", err)
	}
	if err := o.check(args[0], f.Args()); err != nil {
		return err
	}
	bench := benches[args[0]]
	if !slices.Contains([]string{"gdn_ranks", "ulysses", "a2a", "overlap", "layer_overlap", "levels", "gpu_layer",
		"gpu_hybrid"}, args[0]) {
		return bench(o)
	}
	onRank := func(c comm.Comm) (err error) {
		own := *o
		if own.world, err = o.slowed(c); err != nil {
			return err
		}
		return bench(&own)
	}
	if slurm.Env().Tasks <= 1 {
		return comm.RunLocal(o.ranks, onRank)
	}
	world, err := comm.World()
	if err != nil {
		return err
	}
	defer comm.Finalize()
	return onRank(world)
}

// check returns an error if the flags do not fit together or to the suite, or if words follow them.
func (o *options) check(suite string, words []string) error {
	if len(words) > 0 {
		return status.Errorf(status.InvalidArgument, "%s: the word %q is no flag; select cases with --cases", suite,
			words[0])
	}
	if o.repeat < 1 || o.ranks < 1 || o.threads < 0 {
		return status.Errorf(status.InvalidArgument,
			"--repeat %d, --ranks %d and --threads %d: give at least 1, 1 and 0", o.repeat, o.ranks, o.threads)
	}
	f32 := []string{"gdn_ranks", "ulysses", "a2a", "overlap", "levels"}
	if o.compute != tensor.F32 && slices.Contains(f32, suite) {
		return status.Errorf(status.InvalidArgument, "%s --dtype bf16: the suite has tensors in f32; leave --dtype out",
			suite)
	}
	return o.checkLinks()
}

// chosen returns the cases that --cases selects, or all cases but "dry-run", which tests the gpu
// suites on a machine without a GPU.
func (o *options) chosen(all []shape) []shape {
	return slices.DeleteFunc(slices.Clone(all), func(s shape) bool {
		if o.words == "" {
			return s.Name == "dry-run"
		}
		return !o.selects(s.Name)
	})
}

// sizes returns the sizes of all-to-alls that --cases selects.
func (o *options) sizes() []int64 {
	return slices.DeleteFunc(slices.Clone(o.cases.AllToAll),
		func(bytes int64) bool { return !o.selects(strconv.FormatInt(bytes, 10)) })
}

// selects reports whether --cases selects the case of that name.
func (o *options) selects(name string) bool {
	return slices.ContainsFunc(strings.Split(o.words, ","), func(w string) bool { return strings.Contains(name, w) })
}

// repeated calls f warm + repeat times and returns the results of the last repeat calls. f returns
// the seconds that it measured.
func repeated(warm, repeat int, f func() (float64, error)) ([]float64, error) {
	if _, err := calls(warm, 0, f); err != nil {
		return nil, err
	}
	return calls(repeat, 0, f)
}

// calls calls f n times, or at least once until a limit has passed, and returns its results. Limit
// 0 = no limit.
func calls(n int, limit time.Duration, f func() (float64, error)) (times []float64, err error) {
	for began := time.Now(); len(times) < n && (len(times) == 0 || limit == 0 || time.Since(began) < limit); {
		seconds, err := f()
		if err != nil {
			return nil, err
		}
		times = append(times, seconds)
	}
	return times, nil
}

// measure returns the seconds of repeat calls of f, after one call that is not timed. before, if it
// is not nil, runs before each call and is not timed.
func measure(repeat int, before func(), f func() error) ([]float64, error) {
	return repeated(1, repeat, func() (float64, error) {
		if before != nil {
			before()
		}
		return seconds(f)
	})
}

// seconds returns the seconds of one call of f.
func seconds(f func() error) (float64, error) {
	began := time.Now()
	err := f()
	return time.Since(began).Seconds(), err
}

// emit prints the JSON line of a case: the fastest and the median time, the number of times, and
// under the name rate the rate of the fastest in 1e9 units of work a second. more are further
// fields.
func emit(name string, times []float64, rate string, work float64, more map[string]any) {
	times = slices.Sorted(slices.Values(times))
	line := map[string]any{"peer": "ulysses", "case": name, "min_s": times[0], "median_s": median(times),
		"repeat": len(times)}
	if times[0] > 0 {
		line[rate] = work / times[0] / 1e9
	}
	for k, v := range more {
		line[k] = v
	}
	b, _ := json.Marshal(line)
	fmt.Println(string(b))
}

// median returns the middle one of sorted times, or the mean of the middle two.
func median(times []float64) float64 {
	n := len(times)
	return (times[(n-1)/2] + times[n/2]) / 2
}

// peak measures the highest rate of multiply-adds, with which the rates of kernels are compared.
func peak(o *options) error {
	name, measured := "fma-", cpu.PeakFMA
	if o.compute == tensor.BF16 {
		name, measured = "dot-", cpu.PeakDot
	}
	for _, isa := range cpu.ISAs() {
		p, err := measured(o.threads, isa)
		if err != nil {
			return err
		}
		emit(name+isa, []float64{1}, "gflops", p*1e9, map[string]any{"threads": o.threads, "kernels": isa})
	}
	return nil
}
