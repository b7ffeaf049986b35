package train

import (
	"fmt"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/checkpoint"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/sp"
	"ulysses/tensor"
)

// Checkpoints is where a run keeps its states, and when.
type Checkpoints struct {
	Dir   string
	Every int64 // optimizer steps; 0 = only when the run is stopped
	Keep  int64
	Run   map[string]string // what a run that resumes must have in common
	// Model writes what a model's folder has beside the weights, for an export. It is called while steps run.
	Model func(dir string) error
}

// State is what a rank keeps of a group's elements [Lo, Hi): exact weights, F32; their copies of the compute type, if that is another; the
// optimizer's moments, if it has any. All flat.
type State struct {
	Lo, Hi           int64
	Exact, Low, M, V tensor.Tensor
}

// part views elements [lo, hi) of the group in one of them; nil where there is none.
func (x *State) part(i int, lo, hi int64) tensor.Tensor {
	t := [...]tensor.Tensor{x.Exact, x.M, x.V}[i]
	if t.IsNil() {
		return t
	}
	return t.Slice(0, lo-x.Lo, hi-x.Lo)
}

// parts is how many of checkpoint.Parts an optimizer needs.
func (o *OptimizerConfig) parts() int {
	if o.Name == "adamw" {
		return 3
	}
	return 1
}

// groupsOf describes the parameters for a manifest, cut over so many ranks.
func groupsOf(groups []*model.Group, ranks int) []checkpoint.Group {
	all := make([]checkpoint.Group, len(groups))
	for i, g := range groups {
		all[i].Name = g.Name
		for _, p := range g.Params {
			all[i].Tensors = append(all[i].Tensors, checkpoint.Tensor{Name: p.Name, Shape: p.Shape, DType: p.Stored().String()})
		}
		for r := range ranks {
			lo, hi := sp.Shard(g.Numel(), int64(ranks), int64(r))
			all[i].Cut = append(all[i].Cut, []int64{lo, hi})
		}
	}
	return all
}

// saver writes states behind the steps: a copy is taken between two steps and goes to disk while the next ones run.
type saver struct {
	*Checkpoints
	dev     device.Device
	stream  device.Stream
	mesh    *comm.Mesh
	weights Weights
	groups  []*model.Group
	parts   int

	copies  [][]float32 // of the parts, this rank's share of every group
	pieces  []checkpoint.Piece
	next    checkpoint.Manifest
	written chan written // of the state on its way; nil = none
	done    *written     // it is on disk
}

// written is what a rank has written: its file, and the model's on rank 0.
type written struct {
	file  checkpoint.File
	model []checkpoint.File
	err   error
}

// bytes is the host memory of a copy.
func (s *saver) bytes() (n int64) {
	for _, g := range s.groups {
		lo, hi := s.share(g)
		n += 4 * int64(s.parts) * (hi - lo)
	}
	return n
}

// share is the elements of a group that this rank writes.
func (s *saver) share(g *model.Group) (lo, hi int64) {
	return sp.Shard(g.Numel(), int64(s.mesh.World.Size()), int64(s.mesh.World.Rank()))
}

// reserve allocates the copy.
func (s *saver) reserve() {
	if s.copies != nil {
		return
	}
	own := s.bytes() / 4 / int64(s.parts)
	for range s.parts {
		s.copies = append(s.copies, make([]float32, own))
	}
	at := int64(0)
	for _, g := range s.groups {
		lo, hi := s.share(g)
		first := int64(0)
		for _, p := range g.Params {
			from, to := max(lo, first), min(hi, first+p.Numel())
			for i := range s.copies {
				if from < to {
					s.pieces = append(s.pieces, checkpoint.Piece{Name: p.Name + checkpoint.Parts[i], Values: s.copies[i][at+from-lo : at+to-lo]})
				}
			}
			first += p.Numel()
		}
		at += hi - lo
	}
}

// begin copies the state and starts to write it. Collective.
func (s *saver) begin(step, updates int64) error {
	s.reserve()
	dir := checkpoint.Dir(s.Dir)
	var err error
	if s.mesh.World.Rank() == 0 {
		err = dir.Begin(step)
	}
	if err = comm.Agree(s.mesh.World, err); err != nil {
		return err
	}
	at := int64(0)
	for i, g := range s.groups {
		lo, hi := s.share(g)
		state := s.weights.State(i)
		for part := range s.copies {
			if lo == hi {
				continue
			}
			if err := s.dev.Copy(s.stream, tensor.OfFloat32(s.copies[part][at:at+hi-lo], hi-lo), state.part(part, lo, hi)); err != nil {
				return err
			}
		}
		at += hi - lo
	}
	if err := s.stream.Sync(); err != nil {
		return err
	}
	s.next = checkpoint.Manifest{Step: step, Updates: updates}
	s.written, s.done = make(chan written, 1), nil
	go func(to chan written) {
		var w written
		if w.file, w.err = dir.Write(step, s.mesh.World.Rank(), s.pieces); w.err == nil && s.mesh.World.Rank() == 0 {
			w.model, w.err = dir.WriteModel(step, s.Model)
		}
		to <- w
	}(s.written)
	return nil
}

// writing reports whether this rank's file is still on its way. A file that could not be written is an error of this rank alone.
func (s *saver) writing() (bool, error) {
	if s.written == nil || s.done != nil {
		return false, nil
	}
	select {
	case w := <-s.written:
		s.done = &w
		return false, w.err
	default:
		return true, nil
	}
}

// finish waits for the files of all ranks and makes the state appear. Collective.
func (s *saver) finish() error {
	if s.written == nil {
		return nil
	}
	if s.done == nil {
		w := <-s.written
		s.done = &w
	}
	w := *s.done
	s.written, s.done = nil, nil
	world := s.mesh.World
	if err := comm.Agree(world, w.err); err != nil {
		return err
	}
	n := int64(world.Size())
	all, one := make([]int64, 2*n), []int64{w.file.Bytes, int64(w.file.CRC32C)}
	rows := make([]int64, n)
	for i := range rows {
		rows[i] = 1
	}
	if err := world.AllGather(nil, tensor.OfInt64(all, n, 2), tensor.OfInt64(one, 1, 2), rows); err != nil {
		return err
	}
	var err error
	if world.Rank() == 0 {
		m := s.next
		m.Run, m.Parts, m.Groups, m.Model = s.Run, s.parts, groupsOf(s.groups, world.Size()), w.model
		m.Mesh = fmt.Sprintf("%d ranks, ulysses %d, data %d", world.Size(), s.mesh.Ulysses, s.mesh.Replicas)
		for r := range int(n) {
			m.Files = append(m.Files, checkpoint.File{Name: checkpoint.FileName(r), Bytes: all[2*r], CRC32C: uint32(all[2*r+1])})
		}
		err = checkpoint.Dir(s.Dir).Finish(&m, int(s.Keep))
	}
	return comm.Agree(world, err)
}

// Resume fills the weights and the optimizer's state from a checkpoint, written by any number of ranks, and returns the steps and updates it
// stands for. path "" is the newest one; without any it returns 0. Collective, before New.
func (c *Checkpoints) Resume(path string, d device.Device, world comm.Comm, w Weights, groups []*model.Group, o *OptimizerConfig) (step, updates int64, err error) {
	if path == "" {
		newest := []int64{-1}
		if world.Rank() == 0 {
			var steps []int64
			if steps, err = checkpoint.Dir(c.Dir).Steps(); len(steps) > 0 {
				newest[0] = steps[len(steps)-1]
			}
		}
		if err = comm.Agree(world, err); err != nil {
			return 0, 0, err
		}
		if err = world.Broadcast(nil, tensor.OfInt64(newest, 1), 0); err != nil || newest[0] < 0 {
			return 0, 0, err
		}
		path = checkpoint.Dir(c.Dir).Path(newest[0])
	}
	from, err := checkpoint.Open(path)
	if from != nil {
		defer from.Close()
	}
	if err == nil {
		err = from.Fits(c.Run, groupsOf(groups, 0), o.parts())
	}
	if err == nil {
		err = from.Check(world.Rank(), world.Size())
	}
	if err = comm.Agree(world, err); err != nil {
		return 0, 0, err
	}
	if err = comm.Agree(world, fill(from, d, w, groups, o.parts())); err != nil {
		return 0, 0, err
	}
	return from.Step, from.Updates, nil
}

// fill reads what this rank keeps.
func fill(from *checkpoint.Checkpoint, d device.Device, w Weights, groups []*model.Group, parts int) error {
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	piece := make([]float32, 1<<18)
	for i, g := range groups {
		state, first := w.State(i), int64(0)
		for _, p := range g.Params {
			lo, hi := max(state.Lo, first), min(state.Hi, first+p.Numel())
			for part := range parts {
				for at := lo; at < hi; at += int64(len(piece)) {
					values := piece[:min(int64(len(piece)), hi-at)]
					if err := from.Read(p.Name, part, at-first, values); err != nil {
						return err
					}
					if err := d.Copy(s, state.part(part, at, at+int64(len(values))), tensor.OfFloat32(values, int64(len(values)))); err != nil {
						return err
					}
					if err := s.Sync(); err != nil { // the piece is used again
						return err
					}
				}
			}
			first += p.Numel()
		}
		if !state.Low.IsNil() && state.Hi > state.Lo {
			if err := d.Copy(s, state.Low, state.Exact); err != nil {
				return err
			}
		}
	}
	if err := s.Sync(); err != nil {
		return status.Errorf(status.Of(err), "train: resume: %w", err)
	}
	return nil
}
