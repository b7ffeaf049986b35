// Package file reads job files (docs/job-file.md).
//
// Parse turns the bytes of a file and the --set arguments into a Job. It reports all faults at
// once, each with its line. Job.Resolve then computes the settings that depend on the number of
// ranks. A Job also has the names of its outputs, warnings about settings without effect, and the
// text of the job for reports, without secrets. ReadCluster reads the file of plan --cluster by the
// same rules.
package file

import (
	"cmp"
	"fmt"
	"math"
	"strconv"

	"ulysses/data"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/model"
	"ulysses/train"
)

// Job is a checked job file with all defaults. Its paths are relative to the current directory. It
// is read-only after Resolve. The struct tags are explained in train/config.go; in addition to the
// words of enum, number allows an integer not below its value, stored in decimal, and path allows
// any path.
type Job struct {
	Kind       string                `toml:"kind" enum:"train eval attention gdn"`
	Seed       int64                 `toml:"seed" min:"0"`
	Parallel   ParallelTable         `toml:"parallel"`
	Device     DeviceTable           `toml:"device"`
	Model      ModelTable            `toml:"model"`
	Data       data.Config           `toml:"data"`
	Eval       data.EvalConfig       `toml:"eval"`
	Optimizer  train.OptimizerConfig `toml:"optimizer"`
	Train      train.TrainConfig     `toml:"train"`
	LoRA       LoRATable             `toml:"lora"`
	Tile       TileTable             `toml:"tile"`
	Memory     train.MemoryConfig    `toml:"memory"`
	Checkpoint CheckpointTable       `toml:"checkpoint"`
	Output     OutputTable           `toml:"output"`
	Attention  AttentionTable        `toml:"attention"`
	GDN        GDNTable              `toml:"gdn"`

	Path string `toml:"-"` // of the job file, as in the command line
	Mesh Mesh   `toml:"-"` // set by Resolve
	// a verb evaluates with the data of a job of any kind, so keys of training are no mistake
	ByVerb bool `toml:"-"`

	chosen     Mesh              // set by Choose
	accumulate int64             // data.accumulate as the user set it, if Resolve has changed it; 0 = it has not
	at         map[string]origin // where each key was set
	// the paths of a key as written, with ${NAME}; "" for a path without a variable
	written    map[string][]string
	expansions []expansion // values of ${NAME} in paths, the longest first
}

// ParallelTable is [parallel].
type ParallelTable struct {
	Ulysses int64 `toml:"ulysses" min:"0"` // 0 = chosen (plan.Choose)
	Ring    int64 `toml:"ring" min:"0"`    // 0 = chosen if ulysses is, otherwise 1
	// ranks among which the experts of a layer are divided; 0 and 1 = each rank has all
	Experts int64 `toml:"experts" min:"0"`
	Zero    int64 `toml:"zero" min:"0" max:"3"`
	// projections of attention overlap with its all-to-alls
	Overlap string `toml:"overlap" enum:"auto on off"`
	// the groups of a ring get all keys in one all-to-all; auto = chosen (plan.Choose)
	Gather string `toml:"gather" enum:"auto on off"`
	// all-to-alls of a sequence on several nodes have two levels (comm.TwoLevel)
	TwoLevel string `toml:"two_level" enum:"auto on off"`
	// a duration, or a word, for which a rank waits in a collective; ULYSSES_TIMEOUT takes
	// precedence
	Timeout string `toml:"timeout"`
}

// DeviceTable is [device].
type DeviceTable struct {
	Backend string `toml:"backend" enum:"auto cpu cuda"`
	DType   string `toml:"dtype" enum:"auto f32 bf16"`
	// CPU threads of a rank; 0 = the cores that the process may use / ranks of the node
	Threads       int64  `toml:"threads" min:"0" max:"4096"`
	Deterministic bool   `toml:"deterministic"`
	Comm          string `toml:"comm" enum:"auto nccl ipc mpi local"`
}

// ModelTable is [model]: a folder to start from, or the fields of a config.json for a model from
// scratch.
type ModelTable struct {
	Path     string         `toml:"path" path:"dir"`
	Override map[string]any `toml:"override" table:"config.json fields, such as { rope_theta = 5e6 }"` // to replace
	New      map[string]any `toml:"new" table:"config.json fields, such as { rope_theta = 5e6 }"`
}

// LoRATable is [lora]: low-rank adapters beside a frozen model (model.LoRA).
type LoRATable struct {
	Rank    int64    `toml:"rank" min:"0" max:"65536"` // 0 = no adapters
	Alpha   float64  `toml:"alpha" min:"0"`            // 0 = the rank
	RSLoRA  bool     `toml:"rslora"`
	Dropout float64  `toml:"dropout" min:"0"` // below 1
	Targets []string `toml:"targets"`
	Init    string   `toml:"init" path:"dir"` // a folder of PEFT to start from; "" = from seed
}

// Adapters returns the settings of the adapters; nil if there are none.
func (j *Job) Adapters() *model.LoRA {
	t := &j.LoRA
	if t.Rank == 0 {
		return nil
	}
	return &model.LoRA{Rank: t.Rank, Alpha: cmp.Or(t.Alpha, float64(t.Rank)), RSLoRA: t.RSLoRA, Dropout: t.Dropout,
		Targets: t.Targets}
}

// TileTable is [tile]: tokens of a tile, or a word.
type TileTable struct {
	MLP  string `toml:"mlp" enum:"auto off" number:"1"`
	Loss string `toml:"loss" enum:"auto off" number:"1"`
	GDN  string `toml:"gdn" enum:"auto off" number:"1"`
}

// Tiles returns the sizes of tiles as the model takes them.
func (t *TileTable) Tiles() model.Tiles {
	tokens := func(s string) int64 {
		if n, ok := map[string]int64{"auto": model.TileAuto, "off": model.TileOff}[s]; ok {
			return n
		}
		n, _ := strconv.ParseInt(s, 10, 64) // Parse has checked it
		return n
	}
	return model.Tiles{MLP: tokens(t.MLP), Loss: tokens(t.Loss), GDN: tokens(t.GDN)}
}

// CheckpointTable is [checkpoint].
type CheckpointTable struct {
	Every  int64  `toml:"every" min:"0"` // optimizer steps; 0 = only when stopped
	Keep   int64  `toml:"keep" min:"1"`
	Copy   string `toml:"copy" enum:"auto on off"`           // the run goes on while a copy is written
	Best   bool   `toml:"best"`                              // keep the one of the smallest loss of an evaluation
	Dir    string `toml:"dir" path:"inside"`                 // inside output.dir
	Resume string `toml:"resume" path:"dir" enum:"auto off"` // or a checkpoint
	// Accept lists the keys that a resumed run may have changed.
	Accept []string `toml:"accept" enum:"optimizer.lr optimizer.min_lr optimizer.betas optimizer.eps optimizer.weight_decay optimizer.clip optimizer.schedule optimizer.warmup optimizer.decay optimizer.decay_shape optimizer.begin optimizer.group optimizer.expert_bias_rate train.steps data.sequence data.global_batch data.path"`
}

// OutputTable is [output].
type OutputTable struct {
	Dir       string  `toml:"dir" path:"dir"`
	Model     bool    `toml:"model"`
	Overwrite bool    `toml:"overwrite"`     // overwrite results of another run
	Trace     []int64 `toml:"trace" min:"1"` // none, or the first and the last step
	// event files for TensorBoard, in the folder tensorboard
	TensorBoard bool `toml:"tensorboard"`
}

// AttentionTable is [attention].
type AttentionTable struct {
	Input   string   `toml:"input" path:"file"`
	Output  string   `toml:"output" path:"file"`
	Causal  bool     `toml:"causal"`
	Window  [2]int64 `toml:"window" min:"-1"`
	Scale   float64  `toml:"scale"` // 0 = 1/sqrt(D)
	Softcap float64  `toml:"softcap" min:"0"`
	Dropout float64  `toml:"dropout" min:"0" below:"1"`
	Block   [2]int64 `toml:"block" min:"1"`
	// of dropout and of random blocks; 0 = the job's seed
	Seed    int64        `toml:"seed" min:"0"`
	Pattern PatternTable `toml:"pattern"`
}

// PatternTable is [attention.pattern]: the pattern of a block mask (internal/blockmask). Numbers
// are in blocks, and a 0 is the default of the kind.
type PatternTable struct {
	Kind           string  `toml:"kind" enum:"off fixed variable bigbird longformer sliding"`
	PerHead        bool    `toml:"per_head"`
	Horizontal     bool    `toml:"horizontal"`
	Local          int64   `toml:"local" min:"0"`
	Global         int64   `toml:"global" min:"-1"` // -1 = none
	GlobalPatterns int64   `toml:"global_patterns" min:"0"`
	Window         int64   `toml:"window" min:"0"`
	Random         int64   `toml:"random" min:"-1"` // -1 = none
	Windows        []int64 `toml:"windows" min:"1"`
	Globals        []int64 `toml:"globals" min:"0"`
	GlobalEnds     []int64 `toml:"global_ends" min:"1"`
}

// GDNTable is [gdn].
type GDNTable struct {
	Input    string  `toml:"input" path:"file"`
	Output   string  `toml:"output" path:"file"`
	Strategy string  `toml:"strategy" enum:"auto heads state"`
	QKL2Norm bool    `toml:"qk_l2norm"`
	Scale    float64 `toml:"scale"`
	Chunk    int64   `toml:"chunk" min:"16" max:"65536"`
}

// Default returns the Job of an empty job file.
func Default() Job {
	return Job{
		Kind: "train", Seed: 1,
		Parallel: ParallelTable{Overlap: "auto", Gather: "auto", TwoLevel: "auto", Timeout: "auto"},
		Device:   DeviceTable{Backend: "auto", DType: "auto", Comm: "auto"},
		Data: data.Config{Format: "auto", TrainOn: "assistant", ChatTemplate: "auto", Tokenizer: "auto", AddBOS: true,
			AddEOS: true, TextField: "text", Sequence: 4096, Batch: 1, Accumulate: 1,
			Pack: true, Packing: data.Split, Shuffle: true},
		Eval: data.EvalConfig{Format: "auto", SampleTokens: 64},
		Optimizer: train.OptimizerConfig{Name: "adamw", LR: 1e-3, Betas: [2]float64{0.9, 0.95}, Eps: 1e-8, Clip: 1,
			Schedule: "cosine", Warmup: 10, Decay: 0.1, DecayShape: "cosine"},
		Train: train.TrainConfig{Steps: 100, OnNaN: "stop", TimeLimit: "auto"},
		LoRA:  LoRATable{Targets: []string{model.AllLinear}},
		Tile:  TileTable{MLP: "auto", Loss: "auto", GDN: "auto"},
		Memory: train.MemoryConfig{BlockInput: "auto", Attention: "auto", QKV: "auto", MLP: "auto",
			Optimizer: "auto", Gradients: "auto"},
		Checkpoint: CheckpointTable{Keep: 2, Copy: "auto", Dir: "checkpoints", Resume: "auto"},
		Output:     OutputTable{Dir: "out", Model: true},
		Attention: AttentionTable{Causal: true, Window: [2]int64{-1, -1}, Block: [2]int64{64, 64},
			Pattern: PatternTable{Kind: "off"}},
		GDN: GDNTable{Strategy: "auto", QKL2Norm: true, Chunk: 64},
	}
}

// Mesh has the sizes of the mesh: rank = replica·Ulysses·Ring + rank in the sequence axis.
type Mesh struct {
	World, Ulysses, Ring int64
	Replicas             int64 // size of the data axis
	GlobalBatch          int64 // sequences of an optimizer step: Replicas · batch · accumulate
	Gather               bool  // the groups of a ring get all keys in one all-to-all (sp.Layer)
	Experts              int64 // consecutive ranks among which experts are divided; 0 = they are not
}

// String returns the degrees, without a ring of one group and without experts that are not divided.
func (m Mesh) String() string {
	ring := ""
	if m.Ring > 1 {
		ring = fmt.Sprintf(" x ring %d", m.Ring)
	}
	experts := ""
	if m.Experts > 1 {
		experts = fmt.Sprintf(", experts %d", m.Experts)
	}
	return fmt.Sprintf("ulysses %d%s x data %d%s", m.Ulysses, ring, m.Replicas, experts)
}

// Choose sets the degrees that Resolve uses for this number of ranks where the job leaves them
// open, and the form of a ring.
func (j *Job) Choose(m Mesh) { j.chosen = m }

// SequencesOfStep returns the number of sequences of an optimizer step if the job says it without a
// mesh: with parallel.ulysses = 0. The chosen mesh does not change it.
func (j *Job) SequencesOfStep() int64 {
	if g := j.Data.GlobalBatch; g > 0 {
		return g
	}
	return j.Data.Batch * max(j.accumulate, j.Data.Accumulate)
}

// Documents returns the number of documents of a sequence in a plan, by data.document.
func (j *Job) Documents() int64 {
	d := &j.Data
	if d.Document == 0 || d.Document >= d.Sequence {
		return 1
	}
	return (d.Sequence + d.Document - 1) / d.Document
}

// OperatorSeed returns the seed of dropout and of random blocks in a job of kind "attention".
func (j *Job) OperatorSeed() int64 { return cmp.Or(j.Attention.Seed, j.Seed) }

// maxGlobalBatch keeps the numbers of sequences (step · global batch) far below 2^63.
const maxGlobalBatch = 1_000_000_000

// IsSet reports whether the job file or a --set has the key ("optimizer.lr") or a key below it.
func (j *Job) IsSet(key string) bool { _, ok := j.at[key]; return ok }

// Errorf returns an error about the value of a key, in the form of Parse: where the key was set,
// the key, what is wrong and the fix.
func (j *Job) Errorf(code status.Code, key, format string, args ...any) error {
	var f faults
	f.add(j.Origin(key), code, "%s: %s", key, fmt.Sprintf(format, args...))
	return f.err()
}

// Resolve computes the mesh and, from the sequences of a step, data.accumulate for a number of
// ranks, and chooses the tokenizer for data.tokenizer = "auto". Choose sets the degrees that the
// job leaves open; without a choice for this number of ranks, all ranks share a sequence by heads.
// It may be called again for another number of ranks.
func (j *Job) Resolve(world int) error {
	if err := j.chooseTokenizer(); err != nil {
		return err
	}
	w, ring, open := int64(world), j.Parallel.Ring, j.Parallel.Ulysses == 0
	if world < 1 {
		return status.Errorf(status.InvalidArgument, "job: %d ranks; at least 1 is needed", world)
	}
	m := Mesh{World: w, Ulysses: j.Parallel.Ulysses}
	m.Gather = j.Parallel.Gather == "on"
	if c := &j.chosen; c.World == w {
		m.Gather = c.Gather
		if open {
			m.Ulysses, ring = c.Ulysses, cmp.Or(ring, c.Ring)
		}
	}
	ring = max(1, ring)
	m.Ulysses, m.Ring = cmp.Or(m.Ulysses, max(1, w/ring)), ring
	m.Gather = m.Gather && ring > 1
	// Division, because the product of two large degrees may overflow.
	if p := m.Ulysses; p > w || w%p != 0 || (w/p)%ring != 0 {
		key := "parallel.ulysses"
		if open || !j.IsSet(key) {
			key = "parallel.ring"
		}
		return j.Errorf(status.InvalidConfig, key, "ulysses %d x ring %d does not divide the %s; %s", p, ring,
			units.Count(w, "rank"), meshFix(w, ring, p, open))
	}
	m.Replicas = w / (m.Ulysses * ring)
	if n := j.Parallel.Experts; n > 1 {
		if m.Experts = n; w%n != 0 {
			return j.Errorf(status.InvalidConfig, "parallel.experts", "%d does not divide the %s; %s", n,
				units.Count(w, "rank"), divisors("parallel.experts", w, n))
		}
	}
	d := &j.Data
	n := m.Replicas * d.Batch
	switch g := d.GlobalBatch; {
	case j.Kind != "train": // the sequences of a step do not matter
	case g > 0:
		if g%n != 0 {
			return j.Errorf(status.InvalidConfig, "data.global_batch",
				"%d is not a multiple of the %d sequences of a micro-batch on all replicas (%s x data.batch %d); use a multiple of %d",
				g, n, units.Count(m.Replicas, "replica"), d.Batch, n)
		}
		d.Accumulate = g / n
	case open:
		g = j.SequencesOfStep()
		if g%n != 0 {
			return status.Errorf(status.Internal, "job: the chosen mesh, %v, cannot divide the %d sequences of a step",
				m, g)
		}
		j.accumulate = max(j.accumulate, d.Accumulate)
		d.Accumulate = g / n
	}
	m.GlobalBatch = m.Replicas * d.Batch * d.Accumulate
	if m.GlobalBatch > maxGlobalBatch {
		return j.Errorf(status.InvalidConfig, "data.accumulate",
			"the global batch has %d sequences (%s x batch %d x accumulate %d); at most %d are possible",
			m.GlobalBatch, units.Count(m.Replicas, "replica"), d.Batch, d.Accumulate, int64(maxGlobalBatch))
	}
	j.Mesh = m
	return nil
}

// meshFix returns the fix for degrees whose product does not divide the ranks. open says that the
// program may choose ulysses, so that the ring alone has to divide them.
func meshFix(world, ring, ulysses int64, open bool) string {
	if world%ring == 0 {
		return divisors("parallel.ulysses", world/ring, ulysses)
	}
	multiple := ring
	if !open && ulysses <= math.MaxInt64/ring {
		multiple *= ulysses
	}
	return fmt.Sprintf("use a number of ranks that is a multiple of %d", multiple)
}

// divisors returns the fix for the degree of a key that does not divide n: the nearest degrees that
// do.
func divisors(key string, n, wanted int64) string {
	below, above := int64(1), n
	for d := int64(1); d <= n; d++ {
		if n%d == 0 && d <= wanted {
			below = d
		}
		if n%d == 0 && d >= wanted {
			above = d
			break
		}
	}
	if below == above {
		return fmt.Sprintf("use %s = %d", key, below)
	}
	return fmt.Sprintf("use %s = %d or %d", key, below, above)
}
