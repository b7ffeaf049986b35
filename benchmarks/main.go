// Command ulysses-bench times our operations on the shapes of cases.json and prints one JSON line a
// case, in the form of the programs under peers/, so that run.py can put the two side by side.
//
//	ulysses-bench peak|attention|gemm|gdn [--dtype bf16] [--threads N] [--repeat N] [--cases words]
//	ulysses-bench gdn_ranks|ulysses|a2a [--threads N] [--repeat N] [--cases words] [--ranks N]
//	ulysses-bench gpu_attention|gpu_layer|gpu_ops|gpu_host [--device cuda] [--dtype f32] [--repeat N] [--cases words] [--ranks N] [--comm auto]
//
// gdn_ranks, ulysses, a2a and gpu_layer run on the ranks that mpirun started, or on --ranks
// goroutine ranks; the others on one.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	_ "embed"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/internal/status"
	"ulysses/slurm"
	"ulysses/tensor"
)

//go:embed cases.json
var casesJSON []byte

// shape is one case of cases.json.
type shape struct {
	Name    string
	Tokens  int64
	HeadDim int64 `json:"head_dim"`
	Heads   int64
	KVHeads int64 `json:"kv_heads"`
	// key head of each query head, of a rank whose share ends within a group
	KVHead    []int64 `json:"kv_head"`
	Causal    bool
	CuSeqlens []int64 `json:"cu_seqlens"`
	Batch     int64
	M, K, N   int64
	Form      string // nn, nt, tn: which operand lies transposed
	Hidden    int64  // of a layer
	FFN       int64
}

type cases struct {
	Attention, Gemm, Ulysses []shape
	GDN                      []shape
	GDNRanks                 []shape `json:"gdn_ranks"`
	AllToAll                 []int64 `json:"alltoall_bytes"`
	GPUAttention             []shape `json:"gpu_attention"`
	GPULayer                 []shape `json:"gpu_layer"`
}

// options are the flags.
type options struct {
	threads, repeat, ranks int
	words, device, comm    string
	warm                   time.Duration // before a case of the gpu suites is timed
	compute                tensor.DType  // F32 or BF16
	forward                bool
	cases                  cases
	world                  comm.Comm // of those that run on ranks
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "ulysses-bench:", err)
		os.Exit(int(status.Of(err)))
	}
}

func run(args []string) error {
	benches := map[string]func(*options) error{"peak": peak, "attention": attention, "gemm": gemm, "gdn": gdn, "gdn_ranks": gdnRanks, "ulysses": ulysses, "a2a": allToAll,
		"gpu_attention": gpuAttention, "gpu_layer": gpuLayer, "gpu_ops": gpuOps, "gpu_host": gpuHost}
	if len(args) == 0 || benches[args[0]] == nil {
		return status.Errorf(status.InvalidArgument, "usage: ulysses-bench peak|attention|gemm|gdn|gdn_ranks|ulysses|a2a|gpu_attention|gpu_layer|gpu_ops|gpu_host [flags]")
	}
	o := &options{}
	f := flag.NewFlagSet(args[0], flag.ContinueOnError)
	f.IntVar(&o.threads, "threads", 2, "CPU threads of a rank")
	f.IntVar(&o.repeat, "repeat", 7, "timed repetitions of a case")
	f.IntVar(&o.ranks, "ranks", 1, "goroutine ranks, where no launcher started any")
	f.StringVar(&o.device, "device", "cuda", "device of the gpu suites")
	f.StringVar(&o.comm, "comm", "auto", "way between the GPUs of ranks: auto, nccl, ipc, mpi or local")
	f.DurationVar(&o.warm, "warm", time.Second/2, "time that a case of the gpu suites runs before it is timed")
	dtype := f.String("dtype", "", "compute type: f32 or bf16; if not given, bf16 for the gpu suites, f32 for the others")
	f.StringVar(&o.words, "cases", "", "only cases whose name contains one of these words, comma-separated")
	f.BoolVar(&o.forward, "forward", false, "time attention's forward pass alone as well")
	if err := f.Parse(args[1:]); err != nil {
		return status.Errorf(status.InvalidArgument, "%w", err)
	}
	switch o.compute = tensor.ParseDType(strings.ToUpper(*dtype)); {
	case *dtype == "" && strings.HasPrefix(args[0], "gpu_"):
		o.compute = tensor.BF16
	case *dtype == "":
		o.compute = tensor.F32
	case o.compute != tensor.F32 && o.compute != tensor.BF16:
		return status.Errorf(status.InvalidArgument, "--dtype %s: f32 or bf16", *dtype)
	}
	if err := json.Unmarshal(casesJSON, &o.cases); err != nil {
		return status.Errorf(status.Internal, "cases.json: %w", err)
	}
	bench := benches[args[0]]
	if !slices.Contains([]string{"gdn_ranks", "ulysses", "a2a", "gpu_layer"}, args[0]) {
		return bench(o)
	}
	onRank := func(c comm.Comm) error {
		own := *o
		own.world = c
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

// chosen are the cases that --cases names, or all but the dry run, which is for trying the suites
// where there is no GPU.
func (o *options) chosen(all []shape) []shape {
	return slices.DeleteFunc(slices.Clone(all), func(s shape) bool {
		if o.words == "" {
			return s.Name == "dry-run"
		}
		return !slices.ContainsFunc(strings.Split(o.words, ","), func(w string) bool { return strings.Contains(s.Name, w) })
	})
}

// measure times f called back to back, after one call that is not timed; before is called before
// each, untimed.
func measure(repeat int, before func(), f func() error) ([]float64, error) {
	var times []float64
	for i := 0; i <= repeat; i++ {
		if before != nil {
			before()
		}
		t := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		if i > 0 {
			times = append(times, time.Since(t).Seconds())
		}
	}
	return times, nil
}

// emit prints a case. work is in units of 1e9 a second under the name rate.
func emit(name string, times []float64, rate string, work float64, more map[string]any) {
	times = slices.Sorted(slices.Values(times))
	line := map[string]any{"peer": "ulysses", "case": name, "min_s": times[0], "median_s": times[len(times)/2], "repeat": len(times),
		rate: work / times[0] / 1e9}
	for k, v := range more {
		line[k] = v
	}
	b, _ := json.Marshal(line)
	fmt.Println(string(b))
}

// peak is the limit that kernels are held against.
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
