package outdir

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"ulysses/internal/proc"
	"ulysses/slurm"
)

// Record names the process that owns a folder. It is the content of the file .owner.json in the
// folder.
type Record struct {
	Token string `json:"token"` // a random text, new for each ownership
	Host  string `json:"host"`
	PID   int    `json:"pid"`
	// start of the process, in clock ticks since boot; "" = unknown
	Started   string    `json:"started"`
	Boot      string    `json:"boot"`                // ID of the kernel's boot; "" = unknown
	Namespace string    `json:"namespace,omitempty"` // of process IDs
	SlurmJob  string    `json:"slurm_job,omitempty"`
	Restarts  int       `json:"restarts,omitempty"` // how often Slurm has requeued the job
	Kind      string    `json:"kind"`               // of the job: train, eval, ...
	Job       string    `json:"job"`                // path of the job file
	Since     time.Time `json:"since"`
	// the file system has locks, and the process holds one on the file
	Locked bool `json:"locked"`
	// identity of the run, once it is known; see Owner.Identify
	Run string `json:"run,omitempty"`
	// the process has released the folder, and the run is unfinished
	Ended bool `json:"ended"`
}

// Self returns the record of this process for a job.
func Self(kind, job string) Record {
	env := slurm.Env()
	started, _ := process(os.Getpid())
	r := Record{Token: rand.Text(), Host: env.Host, PID: os.Getpid(), SlurmJob: env.JobID, Restarts: env.Restarts,
		Kind: kind, Job: job, Since: time.Now().UTC().Truncate(time.Second), Started: started}
	if boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		r.Boot = strings.TrimSpace(string(boot))
	}
	r.Namespace, _ = os.Readlink("/proc/self/ns/pid") // "" where there is no /proc
	return r
}

// process returns the start of a process of this host, in clock ticks since boot, and its state; ""
// if there is no such process, or no /proc.
func process(pid int) (started string, state life) {
	fields := proc.Stat(pid)
	if len(fields) < 20 {
		return "", dead
	}
	state = alive
	if s := fields[0]; s == "Z" || s == "X" { // a zombie
		state = dead
	} else if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && len(line) == 0 {
		state = dying // its memory is freed, its files are still open
	}
	return fields[19], state
}

// String returns the owner's description for error messages.
func (r *Record) String() string {
	s := fmt.Sprintf("%s job %s on %s (process %d", r.Kind, r.Job, r.Host, r.PID)
	if r.SlurmJob != "" {
		s += ", Slurm job " + r.SlurmJob
	}
	return s + ", since " + r.Since.UTC().Format("2006-01-02 15:04:05 UTC") + ")"
}

// life is the state of a process as another process sees it.
type life int

const (
	unknown life = iota // the process is on another host, or in another container
	alive
	dying // killed; the kernel has not yet closed its files
	dead
)

// seen returns the state of the process of r as the process of self sees it.
func (r *Record) seen(self *Record) life {
	if r.Boot == "" || r.Started == "" || r.Boot != self.Boot || r.Namespace != self.Namespace {
		return unknown
	}
	if started, state := process(r.PID); started == r.Started {
		return state
	}
	return dead // the process ID was reused
}

// requeued reports whether self is a later start of the Slurm job of r. Slurm starts a requeued job
// after the processes of the earlier start have ended.
func (r *Record) requeued(self *Record) bool {
	return r.SlurmJob != "" && r.SlurmJob == self.SlurmJob && r.Restarts < self.Restarts
}

// bytes returns the record as JSON.
func (r *Record) bytes() []byte {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil { // cannot happen for strings and numbers
		panic(err)
	}
	return append(text, '\n')
}

// maxRecord is the largest number of bytes that readRecord reads, because the file may hold
// anything.
const maxRecord = 64 << 10

// readRecord reads the record of an open file. It returns nil if the file has no valid record, such
// as a half-written one.
func readRecord(f *os.File) *Record {
	text := make([]byte, maxRecord)
	n, _ := f.ReadAt(text, 0) // a short file returns io.EOF as well
	r := new(Record)
	if json.Unmarshal(text[:n], r) != nil || r.Token == "" {
		return nil
	}
	return r
}
