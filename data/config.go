package data

// This file has the tables of the job file that this package reads. The toml tag is the key. The
// other tags are the schema by which package job/file checks a job file: min and max are inclusive
// bounds, above and below are exclusive bounds, enum lists the allowed words (separated by spaces),
// and path marks files and folders (glob: patterns of them, inside: a folder in another). Package
// job/file checks rules that involve several keys.

// SourceConfig is a table [[data.source]].
type SourceConfig struct {
	Path []string `toml:"path" path:"glob"`
	// share of the sequences, relative to the other sources; limited so that their sum is finite
	Weight float64 `toml:"weight" above:"0" max:"1e300"`
	Format string  `toml:"format" enum:"auto text messages conversations prompt tokens" default:"auto"`
}

// Config is [data].
type Config struct {
	// .txt, .jsonl, .bin and .safetensors files, or patterns of their names
	Path []string `toml:"path" path:"glob"`
	// instead of path: files that are mixed by weights
	Source []SourceConfig `toml:"source"`
	// of the lines of .jsonl files (package chat); auto = the fields of each line tell it
	Format string `toml:"format" enum:"auto text messages conversations prompt tokens"`
	// "bytes", or a tokenizer.json, or the folder that has one; package job resolves "auto"
	Tokenizer string `toml:"tokenizer" path:"file" enum:"auto bytes"`
	// begin each document of text with the ids with which the tokenizer begins a text
	AddBOS bool `toml:"add_bos"`
	// append the tokenizer's EOS id to each document; the tokenizer "bytes" has none
	AddEOS    bool   `toml:"add_eos"`
	TextField string `toml:"text_field"` // of a .jsonl line
	// tokens of a conversation, or of a prompt with its completion, that have a loss
	TrainOn string `toml:"train_on" enum:"assistant last all"`
	// a .jinja file, or a folder with templates; auto = the folder of the tokenizer
	ChatTemplate string `toml:"chat_template" path:"file" enum:"auto"`
	// the date that a chat template shows, as 2026-01-31; "" = a template that asks is refused
	ChatDate string `toml:"chat_date"`
	// tokens of a sequence, over all ranks
	Sequence int64 `toml:"sequence" min:"1" max:"2147483647"`
	// tokens of a usual document, for plans and the choice of a mesh; 0 = as many as a sequence
	Document int64 `toml:"document" min:"0" max:"2147483647"`
	// sequences of a data-parallel replica in a micro-batch
	Batch int64 `toml:"batch" min:"1" max:"1000000"`
	// micro-batches of an optimizer step
	Accumulate int64 `toml:"accumulate" min:"1" max:"1000000"`
	// sequences of an optimizer step; > 0 sets accumulate
	GlobalBatch int64 `toml:"global_batch" min:"0" max:"1000000000"`
	// tokens of a micro-batch of a replica; 0 = batch sequences
	Budget int64 `toml:"budget" min:"0" max:"2147483647"`
	Pack   bool  `toml:"pack"`
	// how documents become sequences if Pack is set: Split or BestFit
	Packing string `toml:"packing" enum:"split best-fit"`
	Shuffle bool   `toml:"shuffle"`
	// documents are packed in an order drawn from the seed, not in the order of the files
	ShuffleDocuments bool `toml:"shuffle_documents"`
	// of chat templates, as the further arguments of apply_chat_template in transformers
	ChatVariables map[string]any `toml:"chat_variables" table:"variables of the chat template, such as { enable_thinking = false }"`
}

// needsStarts reports whether documents are packed by their lengths or in another order, for which
// the index needs the first token of each document.
func (c *Config) needsStarts() bool {
	return c.Pack && (c.ShuffleDocuments || c.Packing == BestFit)
}

// EvalSetConfig is a table [[eval.set]].
type EvalSetConfig struct {
	Name   string   `toml:"name"`
	Path   []string `toml:"path" path:"glob"`
	Format string   `toml:"format" enum:"auto text messages conversations prompt tokens" default:"auto"`
}

// EvalConfig is [eval].
type EvalConfig struct {
	Path []string `toml:"path" path:"glob"`
	// instead of path: several sets, each with a loss of its own
	Set []EvalSetConfig `toml:"set"`
	// of the lines of .jsonl files
	Format string  `toml:"format" enum:"auto text messages conversations prompt tokens"`
	Split  float64 `toml:"split" min:"0" below:"1"` // share of the documents, not used for training
	Every  int64   `toml:"every" min:"0"`           // optimizer steps; 0 = only after the last step
	// the loss that decides which checkpoint is the best and when the run ends early: that of a
	// set; "" = of all sets together
	Metric string `toml:"metric"`
	// evaluations without an improvement after which the run ends; 0 = it does not end early
	Patience  int64   `toml:"patience" min:"0"`
	Threshold float64 `toml:"threshold" min:"0"` // for patience, only a larger decrease is an improvement
	// prompts that the model continues after each evaluation
	Sample            []string `toml:"sample"`
	SampleChat        bool     `toml:"sample_chat"` // the prompts are what a user says, in the chat template
	SampleTokens      int64    `toml:"sample_tokens" min:"1" max:"1000000"`
	SampleTemperature float64  `toml:"sample_temperature" min:"0" max:"1000000"` // 0 = the most probable token
}
