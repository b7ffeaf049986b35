package job

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/data"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/job/cluster"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/model"
	"ulysses/tensor"
)

// doctorCluster is the verb doctor with --cluster: it checks all ranks of the job before it runs.
// The exit code is that of the first finding.
func doctorCluster(o Options) error {
	o.verb, o.Path = "doctor", o.cluster
	start := launch.Options{Ranks: o.Ranks, Print: o.complain, Folder: o.sharedFolder(), Warn: func(text string) {
		fmt.Fprintln(o.Stderr, "ulysses-mpi: "+text)
	}}
	return launch.Start(start, func(r launch.Rank) (error, bool) { return clusterRank(r, &o) })
}

// clusterRank checks the cluster on one rank. If a rank is late or panics, it ends the job
// (alone = true).
func clusterRank(r launch.Rank, o *Options) (err error, alone bool) {
	host, _ := os.Hostname()
	self := fmt.Sprintf("rank %d on %s", r.World.Rank(), host)
	abort := func(code status.Code, text string) {
		fmt.Fprintf(o.Stderr, "ulysses-mpi: %s\n", text)
		r.World.Abort(code, text)
	}
	watch := comm.NewWatch(r.Timeout, host, func(text string) {
		text = "doctor: " + text + "; the limit is ULYSSES_TIMEOUT or parallel.timeout"
		abort(status.Comm, text)
		r.Late(text)
	})
	defer watch.Close()
	defer func() {
		if p := recover(); p != nil {
			err, alone = status.Errorf(status.Internal, "doctor: %s: panic: %v\n%s", self, p, stack()), true
			abort(status.Internal, err.Error())
		}
	}()
	world := comm.NewCounted(r.World, "world", comm.NewLedger(), clock.New(), watch)
	found, err := checkCluster(world, watch, host, r, o)
	if err != nil {
		return err, false
	}
	if world.Rank() == 0 {
		err = written(0, found.Print(o.Stdout))
	}
	// The launcher ends all processes when the first one exits with an error.
	if err = comm.Agree(world, err); err == nil && found.Code() != status.OK {
		err = endedWith(found.Code())
	}
	return err, false
}

// checkCluster checks the cluster for the job. Collective.
func checkCluster(world comm.Comm, watch *comm.Watch, host string, r launch.Rank, o *Options) (*cluster.Report,
	error) {
	if err := sameCommand(world, o); err != nil {
		return nil, err
	}
	s := &cluster.Subject{Host: host, Version: programVersion(), Program: "/proc/self/exe",
		Variables: cluster.Variables(os.Environ()), Interfaces: cluster.Interfaces()}
	if _, err := os.Stat(s.Program); err != nil {
		s.Program, _ = os.Executable()
	}
	if s.Plugin, s.PluginErr = backends.Plugin(); backends.NoPlugin(s.PluginErr) {
		s.PluginErr = nil
	}
	s.JobFile, s.JobErr = file.Read(o.Path)
	src, err := fileOfRoot(world, o.Path)
	if err != nil {
		return nil, err
	}
	j, err := file.Parse(src, o.Path, o.Sets, os.LookupEnv)
	if err := comm.Agree(world, err); err != nil {
		return nil, err
	}
	// Resolve refuses meshes that do not fit the ranks, and chooses the tokenizer. A model folder
	// that is missing on this node is a finding.
	if err := comm.Agree(world, j.Resolve(world.Size())); err != nil {
		return nil, err
	}
	if word := j.Parallel.Timeout; word != "auto" && os.Getenv("ULYSSES_TIMEOUT") == "" {
		limit, err := launch.Timeout(word)
		if err != nil {
			return nil, err
		}
		watch.SetLimit(limit)
	}
	s.Output, s.OneWriter = j.Output.Dir, j.Kind != "train"
	if !j.IsModelJob() {
		_, output := j.OperatorFiles()
		s.Output, s.OutputKey = filepath.Dir(*output), j.Kind+".output"
	}
	var folder *model.Folder
	s.Files, folder = jobFiles(j)
	if folder != nil {
		defer folder.Close()
	}
	places, own, err := findPlaces(r, j.Device.Threads)
	if err != nil {
		return nil, err
	}
	s.LocalRank = own.local
	s.Open = func() (device.Device, tensor.DType, error) { return openFor(j, own) }
	report, err := cluster.Check(world, s)
	if err == nil {
		report.Advise(placementWarnings(places, int(j.Mesh.Ulysses*j.Mesh.Ring), int(j.Device.Threads)))
	}
	return report, err
}

// openFor opens this rank's device as the job asks for it.
func openFor(j *file.Job, s seat) (device.Device, tensor.DType, error) {
	d, _, err := backends.Open(backends.Choice{Backend: j.Device.Backend, Threads: s.threads, LocalRank: s.local,
		RanksOnNode: s.perNode, Deterministic: j.Device.Deterministic})
	if err != nil {
		return nil, tensor.Invalid, err
	}
	compute, err := j.ComputeType(d.Info())
	if err != nil {
		d.Close()
		return nil, tensor.Invalid, err
	}
	return d, compute, nil
}

// jobFiles lists the files that the job reads. All ranks have the same keys. The folder of the
// model is open, if there is one, because its files are compared tensor by tensor.
func jobFiles(j *file.Job) (list []cluster.Files, folder *model.Folder) {
	add := func(key string, files []comm.File, err error) {
		list = append(list, cluster.Files{Key: key, List: files, Err: err})
	}
	if !j.IsModelJob() {
		input, _ := j.OperatorFiles()
		_, err := os.Stat(*input)
		add(j.Kind+".input", []comm.File{{Name: *input, Path: *input}}, ioError(err))
		return list, nil
	}
	if j.Model.Path != "" {
		var files []comm.File
		var err error
		if folder, err = model.OpenFolder(j.Model.Path, j.Model.Override); err == nil {
			files = folder.Files()
		}
		add("model.path", files, err)
	}
	files, err := data.TokenizerFiles(j.Data.Tokenizer)
	add("data.tokenizer", files, err)
	files, err = data.ChatFiles(j.Data)
	add("data.chat_template", files, err)
	var sources, sets []string
	for _, s := range j.Data.Source {
		sources = append(sources, s.Path...)
	}
	for _, s := range j.Eval.Set {
		sets = append(sets, s.Path...)
	}
	for _, k := range []struct {
		key      string
		patterns []string
	}{{"data.path", j.Data.Path}, {"data.source", sources}, {"eval.path", j.Eval.Path}, {"eval.set", sets}} {
		files, err := data.Files(k.key, k.patterns, j.Data)
		add(k.key, files, err)
	}
	return list, folder
}

func ioError(err error) error {
	if err == nil {
		return nil
	}
	return status.Errorf(status.IO, "%s", strings.TrimPrefix(err.Error(), "stat "))
}
