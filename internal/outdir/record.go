package outdir

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"ulysses/slurm"
)

// Record says which process owns a folder. It is the content of the file .owner.json in it.
type Record struct {
	Token     string    `json:"token"` // drawn for each ownership
	Host      string    `json:"host"`
	PID       int       `json:"pid"`
	Started   string    `json:"started"`             // of the process, in clock ticks since boot; "" where the system does not say
	Boot      string    `json:"boot"`                // ID of the kernel's boot; "" where the system does not say
	Namespace string    `json:"namespace,omitempty"` // of process IDs
	SlurmJob  string    `json:"slurm_job,omitempty"`
	Restarts  int       `json:"restarts,omitempty"` // how often Slurm has requeued the job
	Kind      string    `json:"kind"`               // of the job
	Job       string    `json:"job"`                // its file
	Since     time.Time `json:"since"`
	Locked    bool      `json:"locked"`        // the file system has locks, and the process holds one on the file
	Run       string    `json:"run,omitempty"` // identity of the run, once it is known; see Owner.Identify
	Ended     bool      `json:"ended"`         // the process has given the folder up, and the run is not finished
}

// Self is the record of this process for a job.
func Self(kind, job string) Record {
	env := slurm.Env()
	started, _ := process(os.Getpid())
	r := Record{Token: rand.Text(), Host: env.Host, PID: os.Getpid(), SlurmJob: env.JobID, Restarts: env.Restarts, Kind: kind, Job: job,
		Since: time.Now().UTC().Truncate(time.Second), Started: started}
	if boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		r.Boot = strings.TrimSpace(string(boot))
	}
	r.Namespace, _ = os.Readlink("/proc/self/ns/pid") // "" where there is no /proc
	return r
}

// process is when a process of this host began, in clock ticks since boot, and its state; "" where there is no such process, or no /proc.
func process(pid int) (started string, state life) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", dead
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:]) // the name before it may hold anything
	if len(fields) < 20 {
		return "", dead
	}
	state = alive
	if s := string(fields[0]); s == "Z" || s == "X" { // ended, and not yet waited for
		state = dead
	} else if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && len(line) == 0 { // its memory is gone, its files are not
		state = dying
	}
	return string(fields[19]), state
}

// String names the owner for a refusal.
func (r *Record) String() string {
	s := fmt.Sprintf("%s job %s on %s (process %d", r.Kind, r.Job, r.Host, r.PID)
	if r.SlurmJob != "" {
		s += ", Slurm job " + r.SlurmJob
	}
	return s + ", since " + r.Since.UTC().Format("2006-01-02 15:04:05 UTC") + ")"
}

// life is what one process can tell of another.
type life int

const (
	unknown life = iota // it runs on another host, or in another container
	alive
	dying // it was killed, and the kernel has not yet closed its files
	dead
)

// seen tells whether the process of r is alive, as the process of self can see it.
func (r *Record) seen(self *Record) life {
	if r.Boot == "" || r.Started == "" || r.Boot != self.Boot || r.Namespace != self.Namespace {
		return unknown
	}
	if started, state := process(r.PID); started == r.Started {
		return state
	}
	return dead // the number is another process's
}

// requeued reports whether self is a later start of the Slurm job of r, which Slurm begins when the processes of the earlier one are gone.
func (r *Record) requeued(self *Record) bool {
	return r.SlurmJob != "" && r.SlurmJob == self.SlurmJob && r.Restarts < self.Restarts
}

// bytes is the record as it is written.
func (r *Record) bytes() []byte {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil { // a struct of strings and numbers has none
		panic(err)
	}
	return append(text, '\n')
}

// maxRecord bounds what is read of a file that may be anything.
const maxRecord = 64 << 10

// readRecord reads the record of an open file; nil where it holds none, such as when it is just being written.
func readRecord(f *os.File) *Record {
	text := make([]byte, maxRecord)
	n, _ := f.ReadAt(text, 0) // the end of the file is an error, too
	r := new(Record)
	if json.Unmarshal(text[:n], r) != nil || r.Token == "" {
		return nil
	}
	return r
}
