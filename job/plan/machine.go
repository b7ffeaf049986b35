package plan

import (
	"cmp"
	"fmt"
	"runtime"
	"strings"

	"ulysses/backends"
	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/train"
)

// Machine is one rank's share of the machine of a plan.
type Machine struct {
	text  string // describes the machine and the source of its rates
	Info  device.Info
	Sizes dryrun.Sizes
	Rates dryrun.Rates
	// FLOP/s of matrix products on a rank's share of a CPU, measured after a run; 0 = not measured
	Peak  float64
	Share float64 // threads of ranks for each core, at least 1
	Host  int64   // bytes of host memory that a rank may allocate; 0 = unknown
	close func()

	nominal bool          // the rates are typical ones; only their ratios have a meaning
	cluster *file.Cluster // whose rates replace others; nil = none
}

// thisMachine returns a rank's share of this machine with perNode ranks. The rates of a CPU are
// measured, and the rates of a GPU come from a table.
func thisMachine(j *file.Job, x *subject, perNode int) (*Machine, error) {
	t := &j.Device
	open := func() (device.Device, error) {
		d, _, err := backends.Open(backends.Choice{Backend: t.Backend, Threads: int(t.Threads), RanksOnNode: perNode,
			Deterministic: t.Deterministic})
		return d, err
	}
	d, err := open()
	if err != nil && t.Backend == "cuda" {
		err = status.Errorf(status.Of(err),
			"%w; to plan for other machines with GPUs, describe them with --cluster (examples/clusters/h200.toml)", err)
	}
	if err != nil {
		return nil, err
	}
	m := &Machine{Info: d.Info(), Sizes: d, Host: proc.FreeMemory() / int64(perNode), close: d.Close}
	compute, err := j.ComputeType(m.Info)
	if err == nil && m.Info.Place == tensor.Host {
		err = m.measure(open, sized(j, x, perNode).In(compute), perNode)
	} else if err == nil {
		err = m.shareGPUs(perNode)
		m.recognize(j, compute, perNode)
	}
	if err != nil {
		d.Close()
		return nil, err
	}
	return m, nil
}

// sharedBy returns how many ranks of a node, with a given number of threads each, have cores of
// their own at a time, and how many ranks share the cores of each of these.
func sharedBy(perNode, workers int) (atOnce int, share float64) {
	cores, threads := runtime.NumCPU(), max(1, workers)
	atOnce = max(1, min(perNode, cores/threads))
	return atOnce, max(1, float64(max(1, perNode*threads))/float64(max(cores, atOnce*threads)))
}

// sized returns the shape of a rank's work for a number of ranks, from the fields that the job
// sets.
func sized(j *file.Job, x *subject, ranks int) dryrun.Shape {
	shape := x.shape
	if x.config != nil {
		each := cmp.Or(j.Parallel.Ulysses, int64(ranks))
		shape.Wide, shape.Sequence = x.config.IntermediateSize, j.Data.Sequence
		shape.Tokens = max(1, j.Data.Batch*j.Data.Sequence/max(1, each))
	}
	return shape
}

// measure measures the rates of this host's cores with as many ranks at a time as have cores of
// their own. If the ranks have more threads than the host has cores, each gets its share of the
// rates.
func (m *Machine) measure(open func() (device.Device, error), x dryrun.Shape, perNode int) error {
	atOnce, share := sharedBy(perNode, m.Info.Workers)
	var devices []device.Device
	defer func() {
		for _, d := range devices {
			d.Close()
		}
	}()
	for range atOnce {
		d, err := open()
		if err != nil {
			return err
		}
		devices = append(devices, d)
	}
	var err error
	m.Rates, err = dryrun.Measure(devices, x)
	if err != nil {
		return status.Errorf(status.Of(err), "measuring the rates of this machine: %w", err)
	}
	m.Share = share
	m.Rates = m.Rates.Shared(share)
	m.Rates.PerNode = perNode
	m.text = fmt.Sprintf("%s, kernels %s, %s a rank on %s, as measured", m.Info.Name, m.Info.Kernels,
		units.Count(max(1, m.Info.Workers), "thread"), units.Count(runtime.NumCPU(), "core"))
	return nil
}

// shareGPUs divides the memory of a GPU that several ranks share.
func (m *Machine) shareGPUs(perNode int) error {
	found, err := backends.FindGPUs()
	if err == nil && perNode > found.Count {
		m.Info.Sharing = (perNode + found.Count - 1) / found.Count
		m.Info.Memory /= int64(m.Info.Sharing)
	}
	return err
}

// recognize finds a GPU's rates by its name. An unknown GPU has only the rate of its host.
func (m *Machine) recognize(j *file.Job, compute tensor.DType, perNode int) {
	m.text = m.Info.Name
	g := gpuOf(m.Info.Name)
	if g.name != "" {
		m.known(g, compute)
	}
	m.Rates = m.Rates.Shared(float64(m.Info.Sharing))
	m.Rates.PerNode = perNode
	m.Rates.Host = g.hostRate(int(j.Device.Threads), max(1, runtime.NumCPU()/max(1, perNode)), perNode)
}

// gpuOf returns the figures of the kind of GPU that a name contains; the zero value for an unknown
// one. "NVIDIA GH200 480GB" contains gh200 and h200, of which it is the longer.
func gpuOf(name string) (g gpu) {
	length := 0
	for kind, figures := range gpuByName {
		if len(kind) > length && strings.Contains(strings.ToLower(name), kind) {
			g, length = figures, len(kind)
		}
	}
	return g
}

// Typical rates of a server with GPUs: the memory of two processors, and one thread of them in a
// step of AdamW, whose arithmetic is hidden by its memory traffic.
const (
	hostMemory, hostThread = 400e9, 12e9 // bytes/s read and written
	typicalThreads         = 14          // of a rank: 112 cores for 8 GPUs
	graceCores             = 72          // of NVIDIA Grace
	graceMemory            = 486e9       // bytes/s of its memory, by STREAM (arXiv:2407.07850)
)

// hostRate returns the bytes/s that the CPU threads of a rank read and write while all ranks of the
// node do so. threads is device.threads, 0 = the default; a default of 0 is a typical number.
func (g gpu) hostRate(threads, byDefault, perNode int) float64 {
	memory, typical := hostMemory/float64(max(1, perNode)), typicalThreads
	if g.cores > 0 {
		memory, typical = graceMemory*float64(g.cores)/graceCores, g.cores
	}
	return min(memory, hostThread*float64(cmp.Or(threads, byDefault, typical)))
}

// stepRates returns the rates that decide where the step of an offloaded optimizer runs.
func (m *Machine) stepRates() train.StepRates {
	return train.StepRates{Copies: m.Rates.Copies, Host: cmp.Or(m.Rates.Host, m.Rates.Memory)}
}

// ready returns an error if a rate of the machine is unknown.
func (m *Machine) ready() error {
	if err := m.Rates.Check(); err != nil {
		return status.Errorf(status.Unsupported,
			"plan: the rates of %s are unknown (%w); write its [rates] into a file for --cluster", m.Info.Name, err)
	}
	return nil
}

// gpu has the published figures of a kind of GPU.
type gpu struct {
	name   string
	memory int64 // bytes that a program may allocate
	cores  int   // of its own Grace CPU, or its share of one; 0 = none
	rates  map[tensor.DType]dryrun.Rates
}

// gpuByName has the rates of GPUs. BF16 rates are of cuBLAS and cuDNN with causal attention and
// heads of 128 (NVIDIA's cudnn-frontend publishes those for H200). F32 rates are of FMA, with this
// project's kernels for attention. Links are NVLink and one adapter of 400 Gb/s (A100: 200 Gb/s)
// for each GPU. A B200 has the shares of its peak rates that an H200 has. Its rate of attention is
// the rate of cuDNN by arXiv:2603.05451 (FlashAttention-4, 1605 TFLOP/s, is 1.3 times as fast).
//
// A GH200 computes as an H200 does. The rate of its memory and of copies is that of STREAM on 96 GB
// of HBM3 and on the CPU's memory (arXiv:2407.07850; one direction alone had 375 and 297 GB/s): a
// copy in each direction has half of the CPU's memory. In a GB200 two B200 share a CPU. The network
// adapter of a GH200 has 200 Gb/s, as in Alps and JUPITER.
var gpuByName = map[string]gpu{
	"b200": {"NVIDIA B200", 178 << 30, 0, map[tensor.DType]dryrun.Rates{
		tensor.BF16: {Products: 1590e12, Attention: 1230e12, Gradient: 950e12, Delta: 200e12, Memory: 6.8e12,
			Copies: 50e9, Node: 660e9, Network: 48e9, Launch: 5e-6, Latency: 20e-6},
		tensor.F32: {Products: 54e12, Attention: 22e12, Gradient: 22e12, Delta: 17e12, Memory: 6.8e12, Copies: 50e9,
			Node: 660e9, Network: 48e9, Launch: 5e-6, Latency: 20e-6}}},
	"h200": {"NVIDIA H200", 139 << 30, 0, map[tensor.DType]dryrun.Rates{
		tensor.BF16: {Products: 700e12, Attention: 688e12, Gradient: 581e12, Delta: 100e12, Memory: 4.1e12,
			Copies: 50e9, Node: 330e9, Network: 48e9, Launch: 5e-6, Latency: 20e-6},
		tensor.F32: {Products: 48e12, Attention: 20e12, Gradient: 20e12, Delta: 15e12, Memory: 4.1e12, Copies: 50e9,
			Node: 330e9, Network: 48e9, Launch: 5e-6, Latency: 20e-6}}},
	"h100": {"NVIDIA H100", 78 << 30, 0, map[tensor.DType]dryrun.Rates{
		tensor.BF16: {Products: 680e12, Attention: 650e12, Gradient: 550e12, Delta: 100e12, Memory: 2.9e12,
			Copies: 50e9, Node: 330e9, Network: 48e9, Launch: 5e-6, Latency: 20e-6},
		tensor.F32: {Products: 48e12, Attention: 20e12, Gradient: 20e12, Delta: 15e12, Memory: 2.9e12, Copies: 50e9,
			Node: 330e9, Network: 48e9, Launch: 5e-6, Latency: 20e-6}}},
	"a100": {"NVIDIA A100", 78 << 30, 0, map[tensor.DType]dryrun.Rates{
		tensor.BF16: {Products: 260e12, Attention: 200e12, Gradient: 170e12, Delta: 50e12, Memory: 1.7e12, Copies: 24e9,
			Node: 220e9, Network: 24e9, Launch: 5e-6, Latency: 20e-6},
		tensor.F32: {Products: 18e12, Attention: 9e12, Gradient: 9e12, Delta: 7e12, Memory: 1.7e12, Copies: 24e9,
			Node: 220e9, Network: 24e9, Launch: 5e-6, Latency: 20e-6}}},
}

func init() {
	gpuByName["gb200"] = gpuByName["b200"].onGrace("NVIDIA GB200", 184<<30, graceCores/2,
		func(r *dryrun.Rates) { r.Copies = 120e9 })
	gpuByName["gh200"] = gpuByName["h200"].onGrace("NVIDIA GH200", 94<<30, graceCores,
		func(r *dryrun.Rates) { r.Memory, r.Copies, r.Network = 3.4e12, 240e9, 24e9 })
}

// onGrace returns the figures of a GPU that computes as g does and has a Grace CPU, or a share of
// its cores. change sets the rates that differ.
func (g gpu) onGrace(name string, memory int64, cores int, change func(r *dryrun.Rates)) gpu {
	on := gpu{name, memory, cores, map[tensor.DType]dryrun.Rates{}}
	for t, r := range g.rates {
		change(&r)
		on.rates[t] = r
	}
	return on
}

// machine returns a Machine of GPUs that this host need not have.
func (g gpu) machine(j *file.Job) (*Machine, error) {
	if j.Device.Backend == "cpu" {
		return nil, j.Errorf(status.InvalidConfig, "device.backend",
			"\"cpu\", and the cluster has %s; set it to \"auto\"", g.name)
	}
	d := backends.AbsentGPU(j.Device.Deterministic)
	m := &Machine{Info: d.Info(), Sizes: d, close: func() {}}
	m.Info.Name, m.Info.Memory = g.name, g.memory
	compute, err := j.ComputeType(m.Info)
	if err != nil {
		return nil, err
	}
	m.known(g, compute)
	return m, nil
}

// known sets the rates of a GPU from the table.
func (m *Machine) known(g gpu, compute tensor.DType) {
	m.Rates = g.rates[compute]
	m.text = fmt.Sprintf("%s, computing in %s, by published figures", g.name, file.DTypeName(compute))
}
