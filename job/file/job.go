// Package file is the language of job files: Parse turns the bytes of a file and the --set
// arguments into a Job and reports every fault at once, each with its line; Resolve then settles
// what depends on the number of ranks. A Job also knows the names of its outputs, the settings that
// have no effect, and how to write itself without secrets. ReadCluster reads the file of plan
// --cluster by the same rules.
package file

import (
	"fmt"
	"strconv"

	"ulysses/data"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/train"
)

// Job is a job file, checked, with its defaults filled in and its paths made usable from the
// current directory. It is read-only once Resolve was called. The tags are those explained in
// train/config.go. Beside the words of enum, number allows a whole number not below its value, kept
// in decimal, and path any path.
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
	Tile       TileTable             `toml:"tile"`
	Memory     train.MemoryConfig    `toml:"memory"`
	Checkpoint CheckpointTable       `toml:"checkpoint"`
	Output     OutputTable           `toml:"output"`
	Attention  AttentionTable        `toml:"attention"`
	GDN        GDNTable              `toml:"gdn"`

	Path string `toml:"-"` // of the job file, as given
	Mesh Mesh   `toml:"-"` // set by Resolve

	at map[string]origin // the position at which each key was set
	// of a key with ${NAME} in a path, each path as it was written; "" = without a variable
	written    map[string][]string
	expansions []expansion // of ${NAME} in paths, the longest first
}

// ParallelTable is [parallel].
type ParallelTable struct {
	Ulysses int64 `toml:"ulysses" min:"0"` // 0 = world / ring
	Ring    int64 `toml:"ring" min:"1"`
	Zero    int64 `toml:"zero" min:"0" max:"3"`
}

// DeviceTable is [device].
type DeviceTable struct {
	Backend string `toml:"backend" enum:"auto cpu cuda"`
	DType   string `toml:"dtype" enum:"auto f32 bf16"`
	// CPU threads a rank; 0 = the cores it may use / the ranks that share them
	Threads       int64  `toml:"threads" min:"0"`
	Deterministic bool   `toml:"deterministic"`
	Comm          string `toml:"comm" enum:"auto nccl ipc mpi local"`
}

// ModelTable is [model]: a folder to start from, or the fields of a config.json for a model from
// scratch.
type ModelTable struct {
	Path     string         `toml:"path" path:"dir"`
	Override map[string]any `toml:"override"` // fields of config.json to replace
	New      map[string]any `toml:"new"`
}

// TileTable is [tile]: tokens of a rank in a tile, or a word.
type TileTable struct {
	MLP  string `toml:"mlp" enum:"auto off" number:"1"`
	Loss string `toml:"loss" enum:"auto off" number:"1"`
}

// Tiles are the model's.
func (t *TileTable) Tiles() model.Tiles {
	rows := func(s string) int64 {
		if n, ok := map[string]int64{"auto": model.TileAuto, "off": model.TileOff}[s]; ok {
			return n
		}
		n, _ := strconv.ParseInt(s, 10, 64) // Parse has seen that it is one
		return n
	}
	return model.Tiles{MLP: rows(t.MLP), Loss: rows(t.Loss)}
}

// CheckpointTable is [checkpoint].
type CheckpointTable struct {
	Every  int64  `toml:"every" min:"0"` // optimizer steps; 0 = only when stopped
	Keep   int64  `toml:"keep" min:"1"`
	Dir    string `toml:"dir" path:"inside"`                 // inside output.dir
	Resume string `toml:"resume" path:"dir" enum:"auto off"` // or a checkpoint
	// Accept lists the keys that a resumed run may have changed.
	Accept []string `toml:"accept" enum:"optimizer.lr optimizer.min_lr optimizer.betas optimizer.eps optimizer.weight_decay optimizer.clip optimizer.schedule optimizer.warmup train.steps"`
}

// OutputTable is [output].
type OutputTable struct {
	Dir       string  `toml:"dir" path:"dir"`
	Model     bool    `toml:"model"`
	Overwrite bool    `toml:"overwrite"`     // overwrite results of another run
	Trace     []int64 `toml:"trace" min:"1"` // none, or the first and the last step
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
}

// GDNTable is [gdn].
type GDNTable struct {
	Input    string  `toml:"input" path:"file"`
	Output   string  `toml:"output" path:"file"`
	Strategy string  `toml:"strategy" enum:"auto heads state"`
	QKL2Norm bool    `toml:"qk_l2norm"`
	Scale    float64 `toml:"scale"`
	Chunk    int64   `toml:"chunk" min:"16"`
}

// Default is an empty job file.
func Default() Job {
	return Job{
		Kind: "train", Seed: 1,
		Parallel: ParallelTable{Ring: 1},
		Device:   DeviceTable{Backend: "auto", DType: "auto", Comm: "auto"},
		Data: data.Config{Tokenizer: "auto", AddEOS: true, TextField: "text", Sequence: 4096, Batch: 1, Accumulate: 1,
			Pack: true, Shuffle: true},
		Optimizer: train.OptimizerConfig{Name: "adamw", LR: 1e-3, Betas: [2]float64{0.9, 0.95}, Eps: 1e-8, Clip: 1,
			Schedule: "cosine", Warmup: 10},
		Train:      train.TrainConfig{Steps: 100, OnNaN: "stop", TimeLimit: "auto"},
		Tile:       TileTable{MLP: "auto", Loss: "auto"},
		Memory:     train.MemoryConfig{BlockInput: "auto", Attention: "auto", QKV: "auto", MLP: "auto"},
		Checkpoint: CheckpointTable{Keep: 2, Dir: "checkpoints", Resume: "auto"},
		Output:     OutputTable{Dir: "out", Model: true},
		Attention:  AttentionTable{Causal: true, Window: [2]int64{-1, -1}, Block: [2]int64{64, 64}},
		GDN:        GDNTable{Strategy: "auto", QKL2Norm: true, Chunk: 64},
	}
}

// Mesh is how the ranks of a world share the work: rank = replica·Ulysses·Ring + rank in the
// sequence.
type Mesh struct {
	World, Ulysses, Ring int64
	Replicas             int64 // data parallel
	GlobalBatch          int64 // sequences an optimizer step: Replicas · batch · accumulate
}

// maxGlobalBatch keeps every row number (step · global batch) far inside 64 bits.
const maxGlobalBatch = 1_000_000_000

// IsSet says whether the job file or a --set gave the key ("optimizer.lr") or something below it.
func (j *Job) IsSet(key string) bool { _, ok := j.at[key]; return ok }

// Errorf makes an error about a key's value, in the form Parse uses: where it was set, the key,
// what is wrong and the fix.
func (j *Job) Errorf(code status.Code, key, format string, args ...any) error {
	var f faults
	f.add(j.Origin(key), code, "%s: %s", key, fmt.Sprintf(format, args...))
	return f.err()
}

// Resolve settles what depends on the surroundings: on the number of ranks the mesh, and
// data.accumulate where data.global_batch is given; on the model's folder which tokenizer is meant.
// It may be called again for another number of ranks.
func (j *Job) Resolve(world int) error {
	if err := j.chooseTokenizer(); err != nil {
		return err
	}
	w, ring := int64(world), j.Parallel.Ring
	if world < 1 {
		return status.Errorf(status.InvalidArgument, "job.Resolve: a world of %d ranks: needs at least one", world)
	}
	m := Mesh{World: w, Ulysses: j.Parallel.Ulysses, Ring: ring}
	if m.Ulysses == 0 {
		m.Ulysses = max(1, w/ring)
	}
	// By division, because the product of two large degrees could wrap around.
	if p := m.Ulysses; p > w || w%p != 0 || (w/p)%ring != 0 {
		key := "parallel.ulysses"
		if !j.IsSet(key) {
			key = "parallel.ring"
		}
		return j.Errorf(status.InvalidConfig, key, "ulysses %d x ring %d does not divide the %d ranks: %s", p, ring, w, divisors(w, ring, p))
	}
	m.Replicas = w / (m.Ulysses * ring)
	d := &j.Data
	if g := d.GlobalBatch; g > 0 {
		n := m.Replicas * d.Batch
		if g%n != 0 {
			return j.Errorf(status.InvalidConfig, "data.global_batch",
				"%d is not a whole number of micro-batches of %d sequences (%d replicas x data.batch %d): use a multiple of %d", g, n, m.Replicas, d.Batch, n)
		}
		d.Accumulate = g / n
	}
	m.GlobalBatch = m.Replicas * d.Batch * d.Accumulate
	if m.GlobalBatch > maxGlobalBatch {
		return j.Errorf(status.InvalidConfig, "data.accumulate", "a global batch of %d sequences (%d replicas x batch %d x accumulate %d): at most %d",
			m.GlobalBatch, m.Replicas, d.Batch, d.Accumulate, int64(maxGlobalBatch))
	}
	j.Mesh = m
	return nil
}

// divisors names the nearest degrees that would do.
func divisors(world, ring, wanted int64) string {
	if world%ring != 0 {
		return fmt.Sprintf("use a number of ranks that is a multiple of %d", ring)
	}
	n := world / ring
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
		return fmt.Sprintf("use parallel.ulysses = %d", below)
	}
	return fmt.Sprintf("use parallel.ulysses = %d or %d", below, above)
}
