package data

// The tables of the job file that this package reads. The toml tag is the key. The other tags
// are the schema that job.Parse holds a file to: min and max are bounds that may be reached, above
// and below bounds that may not, enum lists the words allowed (separated by spaces), path marks
// files and folders (glob: patterns of them, inside: a folder in another). Values that are fine one
// by one but not together are refused in job.

// Config is [data].
type Config struct {
	// .txt, .jsonl, .bin and .safetensors files, or patterns for them
	Path []string `toml:"path" path:"glob"`
	// or a tokenizer.json, or the folder that holds it; auto is settled in job
	Tokenizer string `toml:"tokenizer" path:"file" enum:"auto bytes"`
	// after each document, where the tokenizer has one; bytes has none
	AddEOS    bool   `toml:"add_eos"`
	TextField string `toml:"text_field"` // of a .jsonl line
	// global tokens a sequence
	Sequence int64 `toml:"sequence" min:"1" max:"2147483647"`
	// sequences a data-parallel replica and micro step
	Batch int64 `toml:"batch" min:"1" max:"1000000"`
	// micro steps an optimizer step
	Accumulate int64 `toml:"accumulate" min:"1" max:"1000000"`
	// sequences an optimizer step; > 0 sets accumulate
	GlobalBatch int64 `toml:"global_batch" min:"0" max:"1000000000"`
	// tokens a micro step and replica; 0 = batch rows
	Budget  int64 `toml:"budget" min:"0" max:"2147483647"`
	Pack    bool  `toml:"pack"`
	Shuffle bool  `toml:"shuffle"`
}

// EvalConfig is [eval].
type EvalConfig struct {
	Path  []string `toml:"path" path:"glob"`
	Split float64  `toml:"split" min:"0" below:"1"` // share of the documents kept from training
	Every int64    `toml:"every" min:"0"`           // optimizer steps; 0 = at the end only
}
