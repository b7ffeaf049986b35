package job

import (
	"fmt"
	"os"
	"path/filepath"

	"ulysses/internal/status"
	"ulysses/job/doctor"
	"ulysses/job/plan"
	"ulysses/model"
	"ulysses/train"
)

// export is the verb export. o.words are a checkpoint and the folder to write.
func export(o Options) error {
	if _, err := os.Stat(filepath.Join(o.words[0], model.AdapterConfigFile)); err == nil {
		if !o.merge {
			return status.Errorf(status.InvalidArgument,
				"export: %s has adapters, and is no checkpoint; merge them into their model with --merge, or name a checkpoint",
				o.words[0])
		}
		if err := train.MergeAdapters(o.words[0], o.words[1], o.force); err != nil {
			return err
		}
		return written(fmt.Fprintf(o.Stdout, "model with the adapters of %s merged: %s\n", o.words[0], o.words[1]))
	}
	from, step, skipped, err := train.Export(o.words[0], o.words[1], o.force, o.merge)
	if err != nil {
		return err
	}
	for _, why := range skipped {
		if err := written(fmt.Fprintf(o.Stdout, "skipped: %s\n", why)); err != nil {
			return err
		}
	}
	return written(fmt.Fprintf(o.Stdout, "model after step %d, from %s: %s\n", step, from, o.words[1]))
}

// planJob is the verb plan.
func planJob(o Options) error {
	tables := &printer{to: o.Stdout}
	err := plan.Run(plan.Options{Path: o.Path, Sets: o.Sets, Ranks: o.Ranks, Search: o.search, Cluster: o.cluster,
		Stdout: tables, Warn: o.warn})
	if err == nil {
		err = written(0, tables.err)
	}
	return err
}

// doctorVerb is the verb doctor: for this machine, or for all ranks of a job.
func doctorVerb(o Options) error {
	if o.cluster != "" {
		return doctorCluster(o)
	}
	return onFirstRank(func() error { return doctorHere(o) })
}

// doctorHere is the verb doctor.
func doctorHere(o Options) error {
	if err := version(o.Stdout); err != nil {
		return err
	}
	return written(0, doctor.Print(o.Stdout))
}
