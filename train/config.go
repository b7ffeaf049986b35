package train

// This file has the tables of the job file that this package reads. data/config.go explains the
// tags.

// OptimizerConfig is [optimizer].
type OptimizerConfig struct {
	Name string  `toml:"name" enum:"adamw sgd"`
	LR   float64 `toml:"lr" min:"0"`
	// learning rate at the last step of a linear or cosine schedule
	MinLR       float64    `toml:"min_lr" min:"0"`
	Betas       [2]float64 `toml:"betas" min:"0" below:"1"`
	Eps         float64    `toml:"eps" min:"1.2e-38"` // smaller ones are 0 in F32, and 0/0 is NaN
	WeightDecay float64    `toml:"weight_decay" min:"0"`
	Clip        float64    `toml:"clip" min:"0"` // largest global gradient norm; 0 = off
	Schedule    string     `toml:"schedule" enum:"constant linear cosine wsd"`
	Warmup      float64    `toml:"warmup" min:"0"` // optimizer steps; below 1: a share of all steps
	// the last steps of schedule wsd, in which the rate falls; below 1: a share of all steps
	Decay      float64 `toml:"decay" min:"0"`
	DecayShape string  `toml:"decay_shape" enum:"cosine linear 1-sqrt"`
	// after each step, the bias by which an expert is chosen moves by this towards equal loads; 0 =
	// off
	ExpertBiasRate float64 `toml:"expert_bias_rate" min:"0"`
	// steps that an earlier schedule had: the schedule is of the steps that follow
	Begin int64 `toml:"begin" min:"0"`
	// parameters with a weight decay of their own; the first one that matches decides
	Group []GroupConfig `toml:"group"`
}

// GroupConfig is a table [[optimizer.group]].
type GroupConfig struct {
	Match       []string `toml:"match"` // patterns of names (model.ParsePatterns)
	WeightDecay float64  `toml:"weight_decay" min:"0" required:"true"`
}

// MemoryConfig is [memory]: the policy for each category of saved activations, where the
// optimizer's states are, and limits in GiB.
type MemoryConfig struct {
	BlockInput string `toml:"block_input" enum:"auto keep recompute offload"`
	Attention  string `toml:"attention" enum:"auto keep recompute offload"`
	QKV        string `toml:"qkv" enum:"auto keep recompute offload"`
	MLP        string `toml:"mlp" enum:"auto keep recompute offload"`
	// every segment-th block input is kept or offloaded; 0 = auto
	Segment int64 `toml:"segment" min:"0" max:"1000000"`
	// groups of heads for which attention and its all-to-all run together; 0 = auto
	HeadGroups int64 `toml:"head_groups" min:"0" max:"1000000"`
	// where the optimizer's states are, and where its step runs; see FasterStep
	Optimizer string  `toml:"optimizer" enum:"auto device offload stream host"`
	Gradients string  `toml:"gradients" enum:"auto device offload"` // where gradients are summed
	Device    float64 `toml:"device" min:"0" unit:"GiB"`
	Host      float64 `toml:"host" min:"0" unit:"GiB"`
}

// OffloadsOptimizer reports whether the optimizer's states are in host memory.
func (m *MemoryConfig) OffloadsOptimizer() bool {
	return m.Optimizer != "auto" && m.Optimizer != "device"
}

// TrainConfig is [train].
type TrainConfig struct {
	Steps     int64   `toml:"steps" min:"0" max:"1000000000"` // optimizer steps of the whole run
	Epochs    float64 `toml:"epochs" min:"0" max:"1000000"`   // > 0: instead of steps
	OnNaN     string  `toml:"on_nan" enum:"stop skip"`
	TimeLimit string  `toml:"time_limit"`
	// patterns of names of parameters that are not trained (model.ParsePatterns)
	Freeze []string `toml:"freeze"`
}
