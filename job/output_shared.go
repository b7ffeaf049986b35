package job

import (
	"encoding/json"
	"fmt"
	"os"

	"ulysses/comm"
	"ulysses/internal/outdir"
	"ulysses/internal/status"
)

// shareOutput checks that every rank sees and may write rank 0's output.dir, because every rank
// writes its own file of a checkpoint. It runs before the first step. All ranks return the same
// error. Collective; the folder must exist.
func (e *Env) shareOutput() error {
	var own outdir.Token
	var err error
	world, dir := e.Mesh.World, e.Job.Output.Dir
	host, _ := os.Hostname()
	if world.Rank() == 0 && world.Size() > 1 {
		if own, err = outdir.WriteToken(dir, host); err != nil {
			err = status.Errorf(status.IO, "output.dir: %w; choose a folder that you may write to", err)
		}
		defer own.Remove(dir)
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
	var t outdir.Token
	if err = json.Unmarshal(text, &t); err == nil && world.Rank() > 0 {
		if err = t.See(dir, fmt.Sprintf("rank %d on %s", world.Rank(), host)); err != nil {
			err = e.Job.Errorf(status.InvalidConfig, "output.dir", "%v", err)
		}
	}
	return comm.Agree(world, err)
}
