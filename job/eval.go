package job

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/model"
	"ulysses/train"
)

// Eval is the verb eval: it evaluates the folder that o.words name with the data of the job.
func Eval(o Options) error {
	o.verb = "eval"
	o.Sets, o.fault = o.evaluationOf(o.folder())
	return onRanks(o, runKind)
}

// folder returns the word after the job file; "" if there is none.
func (o *Options) folder() string {
	if len(o.words) < 2 {
		return ""
	}
	return o.words[1]
}

// evaluationOf returns o.Sets with the keys that evaluate a folder: a checkpoint, a folder of
// checkpoints, a folder of PEFT or a Hugging Face folder. "" is the folder of the job's
// checkpoints. Adapters have the rank, scale and targets of their folder: the job may have others,
// or none.
func (o *Options) evaluationOf(folder string) ([]string, error) {
	if folder == "" {
		src, err := file.Read(o.Path)
		if err != nil {
			return nil, err
		}
		j, err := file.Parse(src, o.Path, o.Sets, os.LookupEnv)
		if err != nil {
			return nil, err
		}
		if folder = j.CheckpointDir(); train.FindCheckpoint(folder) == "" {
			return nil, status.Errorf(status.InvalidConfig,
				"%s: the job has no checkpoint in %s; name a checkpoint or a model folder after the job file",
				o.verb, folder)
		}
	}
	has := func(name string) bool {
		_, err := os.Stat(filepath.Join(folder, name))
		return err == nil
	}
	sets := []string{"kind=eval", "output.trace=[]"}
	path := file.TOML(folder)
	switch {
	case train.FindCheckpoint(folder) != "":
		sets = append(sets, "checkpoint.resume="+path)
	case has(model.AdapterConfigFile):
		adapters, err := model.OpenAdapters(folder)
		if err != nil {
			return nil, err
		}
		defer adapters.Close()
		l := adapters.LoRA
		sets = append(sets, "checkpoint.resume=auto", "lora.init="+path, fmt.Sprint("lora.rank=", l.Rank),
			"lora.alpha="+file.TOML(l.Alpha), fmt.Sprint("lora.rslora=", l.RSLoRA),
			"lora.targets="+file.TOML(l.Targets))
	case has("config.json"):
		// A whole model, such as the base model, or the one with which adapters have been merged.
		sets = append(sets, "checkpoint.resume=auto", "model.new={}", "model.path="+path, "lora={}")
	case !has("."):
		return nil, status.Errorf(status.InvalidConfig, "%s: %s: no such folder; name a checkpoint or a model folder",
			o.verb, folder)
	default:
		return nil, status.Errorf(status.InvalidConfig,
			"%s: %s has neither checkpoints (step-NNNNNNNN), nor config.json, nor %s; name another folder", o.verb,
			folder, model.AdapterConfigFile)
	}
	return append(slices.Clone(o.Sets), sets...), nil
}
