// Package cluster checks the ranks and nodes of a job before it runs (ulysses-mpi doctor
// --cluster): that all of them have the same program, files and settings, and that no node, GPU or
// link is much slower than the others.
//
// Check gathers the Facts of all ranks, compares them and measures clocks, links and devices. Its
// Report has a table by node and the findings.
package cluster

import (
	"cmp"
	"os"
	"path/filepath"
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/outdir"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Subject is what a rank contributes to a check. All ranks have the same keys of Files, in the same
// order.
type Subject struct {
	Host      string // this rank's node, in messages
	LocalRank int    // among the ranks of the node
	Version   string // of the program
	Program   string // path of the program
	Plugin    string // path of the CUDA plug-in; "" = none
	PluginErr error  // why the plug-in cannot be used; nil if there is none
	JobFile   []byte // as this rank reads it
	JobErr    error
	Files     []Files
	Output    string // folder of the results
	// OutputKey is the key of an operator job that names a file in Output, which must exist; "" =
	// output.dir, which a run creates.
	OutputKey string
	OneWriter bool // only rank 0 writes into Output
	// Open opens the device of this rank, with the type of the job's matrix products.
	Open func() (device.Device, tensor.DType, error)
	// Variables are the environment variables by name. Interfaces are the network interfaces.
	Variables  map[string]string
	Interfaces []string
	Budget     time.Duration // for all links; 0 = 30 s

	now func() time.Time // nil = time.Now; for tests
}

// Files are the files that a key of the job names, or why this rank cannot read them.
type Files struct {
	Key  string
	List []comm.File
	Err  error
}

// Check checks all ranks. An error means that the check itself has failed; what it finds is in the
// report, which is the same on all ranks. Collective.
func Check(c comm.Comm, s *Subject) (*Report, error) {
	own := s.facts()
	d, own := s.measure(c, own)
	if d != nil {
		defer d.Close()
	}
	all, err := comm.GatherJSON(c, "doctor", own)
	if err != nil {
		return nil, err
	}
	r := &Report{Ranks: all, Findings: compare(all)}
	for _, check := range []func(comm.Comm, *Subject) error{r.files, r.output, r.clocks, r.links} {
		if err := check(c, s); err != nil {
			return nil, err
		}
	}
	r.Findings = append(r.Findings, speeds(all)...)
	return r, nil
}

// facts returns what this rank sees without the others.
func (s *Subject) facts() Facts {
	f := Facts{Host: s.Host, LocalRank: s.LocalRank, Version: s.Version, Variables: s.Variables,
		Interfaces: s.Interfaces, Free: proc.FreeMemory()}
	f.Program = checksumOf(s.Program)
	switch {
	case s.PluginErr != nil:
		f.Plugin = "cannot be used: " + s.PluginErr.Error()
	case s.Plugin != "":
		f.Plugin = checksumOf(s.Plugin)
	default:
		f.Plugin = "none"
	}
	if f.JobFile = checksum(s.JobFile); s.JobErr != nil {
		f.JobFile = "cannot be read: " + s.JobErr.Error()
	}
	for _, k := range s.Files {
		if k.Err != nil {
			f.Faults = append(f.Faults, Fault{k.Key, k.Err.Error(), status.Of(k.Err)})
		}
	}
	return f
}

// measure opens this rank's device and measures it while the other ranks do the same. It returns
// the device, nil if there is none.
func (s *Subject) measure(c comm.Comm, f Facts) (device.Device, Facts) {
	d, dtype, err := s.Open()
	if err == nil {
		info := d.Info()
		f.Kind, f.Device, f.Kernels, f.Compute = info.Kind, info.Name, info.Kernels, dtype
	}
	// Ranks of a node share its cores and its power, so all measure at once. An error of this
	// barrier comes back from the next collective.
	_ = c.Barrier()
	if err == nil {
		f.Rate, err = productRate(d, dtype)
	}
	if err != nil {
		f.Faults = append(f.Faults, Fault{"device", err.Error(), status.Of(err)})
	}
	return d, f
}

// files compares the files of each key that all ranks can read.
func (r *Report) files(c comm.Comm, s *Subject) error {
	for _, k := range s.Files {
		if r.hasFault(k.Key) {
			continue
		}
		err := comm.SameFiles(c, k.Key, k.List)
		if status.Of(err) == status.Comm {
			return err
		}
		if err != nil {
			r.Findings = append(r.Findings, Finding{status.Of(err), k.Key, withoutKey(err.Error(), k.Key)})
		}
	}
	return nil
}

func (r *Report) hasFault(key string) bool {
	for _, f := range r.Ranks {
		for _, x := range f.Faults {
			if x.What == key {
				return true
			}
		}
	}
	return false
}

// output checks that the ranks that write into the folder of the results can do so, and see the
// same folder. If output.dir does not exist, it checks the nearest folder above it. Nothing stays
// behind.
func (r *Report) output(c comm.Comm, s *Subject) error {
	type start struct {
		Dir   string
		Token outdir.Token
		Err   string
	}
	var first start
	key := cmp.Or(s.OutputKey, "output.dir")
	if c.Rank() == 0 {
		if first.Dir = s.Output; s.OutputKey == "" {
			first.Dir = existing(s.Output)
		}
		var err error
		if first.Token, err = outdir.WriteToken(first.Dir, s.Host); err != nil {
			first.Err = err.Error()
		}
		defer first.Token.Remove(first.Dir)
	}
	all, err := comm.GatherJSON(c, "doctor: "+key, first)
	if err != nil {
		return err
	}
	first = all[0]
	if first.Err != "" {
		r.Findings = append(r.Findings,
			Finding{status.IO, key, who(r.Ranks, 0) + " cannot write into it: " + first.Err +
				"; choose a folder that you may write to"})
		return nil
	}
	if s.OneWriter {
		return nil
	}
	var own string
	if c.Rank() > 0 {
		if err := first.Token.See(first.Dir, who(r.Ranks, c.Rank())); err != nil {
			own = err.Error()
		}
	}
	texts, err := comm.GatherBytes(c, []byte(own))
	if err != nil {
		return err
	}
	seen := map[string]bool{} // one finding for a node
	for rank, text := range texts {
		if host := r.Ranks[rank].Host; len(text) > 0 && !seen[host] {
			seen[host] = true
			r.Findings = append(r.Findings, Finding{status.InvalidConfig, key, string(text)})
		}
	}
	return nil
}

// existing returns the folder, or the nearest one above it that exists.
func existing(dir string) string {
	dir, err := filepath.Abs(dir)
	for err == nil {
		if info, stat := os.Stat(dir); stat == nil && info.IsDir() || dir == filepath.Dir(dir) {
			break
		}
		dir = filepath.Dir(dir)
	}
	return dir
}
