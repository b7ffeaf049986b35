package job

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"ulysses/comm"
	"ulysses/internal/status"
)

// token is the file that rank 0 writes into output.dir and the other ranks look for.
type token struct{ Host, Name, Text string }

// lookFor is how long a rank looks for the file: a network file system shows a new file on other
// nodes with a delay.
const lookFor = 3 * time.Second

// shareOutput checks that every rank sees and may write rank 0's output.dir, because every rank
// writes its own file of a checkpoint. It runs before the first step. All ranks return the same
// error. Collective; the folder must exist.
func (e *Env) shareOutput() error {
	var own token
	var err error
	world, dir := e.Mesh.World, e.Job.Output.Dir
	host, _ := os.Hostname()
	if world.Rank() == 0 && world.Size() > 1 {
		own, err = writeToken(dir, host)
		if own.Name != "" {
			defer os.Remove(filepath.Join(dir, own.Name))
		}
	}
	if err = comm.Agree(world, err); err != nil || world.Size() == 1 {
		return err
	}
	text, err := json.Marshal(own)
	if err != nil {
		return err
	}
	if text, err = comm.BroadcastBytes(world, text, 0); err != nil {
		return err
	}
	var t token
	if err = json.Unmarshal(text, &t); err == nil && world.Rank() > 0 {
		err = e.seeToken(&t, host)
	}
	return comm.Agree(world, err)
}

// writeToken creates the file, under a random name.
func writeToken(dir, host string) (t token, err error) {
	t = token{Host: host, Name: ".shared." + rand.Text(), Text: rand.Text()}
	if err = os.WriteFile(filepath.Join(dir, t.Name), []byte(t.Text), 0o666); err != nil {
		return t, status.Errorf(status.IO, "output.dir: %w; choose a folder that you may write to", err)
	}
	return t, nil
}

// seeToken looks for rank 0's file and opens it for writing.
func (e *Env) seeToken(t *token, host string) error {
	dir, rank := e.Job.Output.Dir, e.Mesh.World.Rank()
	var text []byte
	var err error
	for end := time.Now().Add(lookFor); ; time.Sleep(lookFor / 30) {
		if text, err = os.ReadFile(filepath.Join(dir, t.Name)); err == nil && string(text) == t.Text {
			break
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return e.Job.Errorf(status.InvalidConfig, "output.dir", "rank %d on %s cannot read a file of rank 0 on %s: %v; choose a folder that all nodes may read and write", rank, host, t.Host, err)
		}
		if time.Now().After(end) {
			return e.Job.Errorf(status.InvalidConfig, "output.dir", "%s is not shared: rank %d on %s does not see a file of rank 0 on %s; choose a folder on a shared file system", dir, rank, host, t.Host)
		}
		_, _ = os.ReadDir(dir) // reading the folder makes NFS fetch it from the server
	}
	f, err := os.OpenFile(filepath.Join(dir, t.Name), os.O_RDWR, 0)
	if err != nil {
		return e.Job.Errorf(status.InvalidConfig, "output.dir", "rank %d on %s cannot write into it: %v; choose a folder that all nodes may read and write", rank, host, err)
	}
	return f.Close()
}
