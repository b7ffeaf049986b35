package flight

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"ulysses/internal/status"
)

// Find returns the diagnosis of the records in a folder: the one that a rank has written there, or
// a new one. When a launcher ends a job, a stopped process may continue for a moment, so what was
// written before is better.
func Find(dir string) (*Diagnosis, error) {
	text, err := os.ReadFile(filepath.Join(dir, verdictFile))
	if err == nil && len(text) > 0 {
		d := new(Diagnosis)
		err := json.Unmarshal(text, d)
		for _, x := range d.Culprits { // callers look up its rank
			if err == nil && (x.Rank < 0 || x.Rank >= len(d.Ranks)) {
				err = fmt.Errorf("it names rank %d of %d ranks", x.Rank, len(d.Ranks))
			}
		}
		if err != nil {
			return nil, status.Errorf(status.IO, "%s is damaged: %w; remove it, and the records of the ranks are compared",
				filepath.Join(dir, verdictFile), err)
		}
		return d, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, status.Errorf(status.IO, "%w", err)
	}
	ranks, err := ReadFolder(dir)
	if err != nil {
		return nil, err
	}
	d := Diagnose(ranks)
	if text := ended(ranks); text != "" {
		d.Culprits, d.Text = []Culprit{}, text
	}
	return d, nil
}

// ended describes the end of the process of a run whose ranks are goroutines: all ranks end
// together, so their records do not show which one is gone. It returns "" if the ranks are in
// several processes, if one has recorded how it ended, or if the process may still run.
func ended(ranks []*Rank) string {
	last := time.Time{}
	for _, r := range ranks {
		if r == nil || r.State != Running || r.PID != ranks[0].PID || r.Host != ranks[0].Host {
			return ""
		}
		if beat := r.Zero.Add(r.Beat); beat.After(last) {
			last = beat
		}
	}
	first := ranks[0]
	host, _ := os.Hostname()
	here := host == first.Host
	if here && syscall.Kill(first.PID, 0) != syscall.ESRCH || !here && time.Since(last) < time.Minute {
		return ""
	}
	return fmt.Sprintf("the process of all ranks (pid %d%s) has ended without an error, after step %d, at about %s: it was killed, perhaps because the host had no memory left; see the kernel's log (dmesg)",
		first.PID, onHost(first.Host), first.Step, last.Format(time.DateTime))
}

// Dead diagnoses the records in a folder after a signal that a launcher sends to the processes that
// are left when one has died. It returns nil if no process is gone, or if another rank has written
// the diagnosis.
func Dead(dir string) (*Diagnosis, error) {
	if _, err := os.Stat(filepath.Join(dir, verdictFile)); err == nil {
		return nil, nil
	}
	ranks, err := ReadFolder(dir)
	if err != nil {
		return nil, err
	}
	d := Diagnose(ranks)
	for _, x := range d.Culprits {
		if d.Ranks[x.Rank].Condition == Gone {
			return decide(dir, func() (*Diagnosis, error) { return d, nil })
		}
	}
	return nil, nil
}

// verdictFile has the diagnosis of the rank that was the first to write it.
const verdictFile = "diagnosis.json"

// Decide diagnoses the records in a folder for the rank that calls it first, and writes the
// diagnosis there. For the other ranks it returns nil: one message is enough.
func Decide(dir string) (*Diagnosis, error) {
	return decide(dir, func() (*Diagnosis, error) {
		ranks, err := ReadFolder(dir)
		if err != nil {
			return nil, err
		}
		return Diagnose(ranks), nil
	})
}

// decide is Decide with the diagnosis that a function returns, which it calls for the first rank.
func decide(dir string, diagnose func() (*Diagnosis, error)) (*Diagnosis, error) {
	f, err := os.OpenFile(filepath.Join(dir, verdictFile), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if os.IsExist(err) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer f.Close()
	d, err := diagnose()
	if err != nil {
		return nil, err
	}
	w := json.NewEncoder(f)
	w.SetIndent("", "  ")
	return d, w.Encode(d)
}
