package train

import (
	"fmt"
	"slices"
	"time"

	"ulysses/checkpoint"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
)

// saver writes checkpoints while steps run: it copies the training state to the host between two
// steps, and a goroutine writes the copy to disk during the next ones. Without a copy, the run
// waits until the file is written.
type saver struct {
	*Checkpoints
	dev      device.Device
	stream   device.Stream
	mesh     *comm.Mesh
	model    *model.Model
	weights  Weights
	stored   []Stored // the trained parameters
	frozen   []checkpoint.Tensor
	kinds    int // of checkpoint.Kinds, which the optimizer has
	saved    func(took time.Duration)
	left     func(err error)
	settings map[string]string
	stages   []Stage
	// steps between evaluations; 0 = only after the last step
	evalEvery int64

	waits bool // no copy, although the run writes checkpoints
	// arena is the copy, in the host's memory; nil = none.
	arena   *device.Arena
	copies  [][]float32 // in arena, for each kind: this rank's shards of all groups
	shards  []checkpoint.Shard
	next    checkpoint.Manifest
	began   time.Time    // when next was begun
	written chan written // result for the checkpoint that is being written; nil = none
	done    *written     // received from written
	kept    int64        // step of the checkpoint of the best evaluation; 0 = none
}

// written is the result of a rank: its file and, on rank 0, the files of the model folder.
type written struct {
	file  checkpoint.File
	model []checkpoint.File
	err   error
}

func newSaver(s *Setup) *saver {
	return &saver{Checkpoints: s.Checkpoints, dev: s.Device, mesh: s.Mesh, model: s.Model, weights: s.Weights,
		stored: s.Weights.Stored(), frozen: frozenOf(s.Model.Groups()), kinds: s.Optimizer.kinds(),
		saved: s.Hooks.Saved, left: s.Hooks.Left, settings: settings(s.Optimizer, s.Loop.Steps), stages: s.Loop.Stages,
		evalEvery: s.Loop.EvalEvery}
}

// useful reports whether a copy has a use: checkpoints that are written only when the run is
// stopped need none. States that are offloaded are written from the host memory in which they are:
// a copy would need as much host memory again.
func (s *saver) useful() bool {
	return s != nil && (s.Every > 0 || s.Best) && !s.weights.Offloaded()
}

// mayWait reports whether the planner may leave out the copy.
func (s *saver) mayWait() bool { return s.useful() && isAuto(s.Copy) }

// setWaits leaves out the copy, or not.
func (s *saver) setWaits(waits bool) {
	if s != nil {
		s.waits = waits || s.Copy == "off"
	}
}

// interval returns the least number of steps between checkpoints, of a run for which a copy is
// useful.
func (s *saver) interval() int64 {
	if s.Best && s.evalEvery > 0 && (s.Every == 0 || s.evalEvery < s.Every) {
		return s.evalEvery
	}
	return max(1, s.Every)
}

// copyBytes returns the size of a copy.
func (s *saver) copyBytes() (n int64) {
	for i := range s.stored {
		lo, hi := s.stored[i].shard()
		n += 4 * int64(s.kinds) * (hi - lo)
	}
	return n
}

// component lists the memory of the copy, if there is one.
func (s *saver) component() []model.Component {
	if !s.useful() || s.waits {
		return nil
	}
	name, host := "checkpoint copy", s.dev.Info().Place != tensor.Host
	if host { // the device has memory of its own
		name += " (host)"
	}
	return []model.Component{{Name: name, Bytes: s.copyBytes(), Host: host}}
}

// CheckpointBytes returns the bytes of the weights and moments in a checkpoint of the run; 0 if it
// writes one only when it is stopped.
func (t *Trainer) CheckpointBytes() (bytes int64) {
	if t.saver == nil || t.saver.Every == 0 && !t.saver.Best {
		return 0
	}
	for _, x := range t.saver.weights.Portions() {
		if !x.Frozen {
			bytes += 4 * int64(t.saver.kinds) * x.Numel()
		}
	}
	return bytes
}

// peak returns the bytes of the device's memory that the copy has used.
func (s *saver) peak() int64 {
	if s == nil || s.arena == nil || s.dev.Info().Place != tensor.Host {
		return 0
	}
	return s.arena.Peak()
}

// free waits until the copy is written and releases it.
func (s *saver) free() {
	if s == nil {
		return
	}
	if s.written != nil && s.done == nil {
		<-s.written
	}
	if s.arena != nil {
		s.arena.Free()
	}
}

// shard returns the elements [lo, hi) of a portion that this rank writes.
func (x *Stored) shard() (lo, hi int64) {
	return comm.Shard(x.Numel(), int64(x.Ranks.Size()), int64(x.Ranks.Rank()))
}

// reserve allocates the copy and lists the shards of this rank's file. stream is the stream of the
// steps.
func (s *saver) reserve(stream device.Stream) (err error) {
	s.stream = stream
	for _, c := range s.component() {
		if s.arena, err = device.NewHostArena(s.dev, c.Name, c.Bytes); err != nil {
			return err
		}
		own := c.Bytes / 4 / int64(s.kinds)
		all, err := s.arena.Tensor(tensor.F32, int64(s.kinds), own)
		if err != nil {
			return err
		}
		for kind := range int64(s.kinds) {
			s.copies = append(s.copies, all.Select(0, kind).Float32s())
		}
	}
	at := int64(0)
	for i := range s.stored {
		x := &s.stored[i]
		lo, hi := x.shard()
		first := int64(0)
		for _, p := range x.Params {
			from, to := max(lo, first), min(hi, first+p.Numel())
			for kind := range s.kinds {
				if from >= to {
					continue
				}
				shard := checkpoint.Shard{Name: p.Name + checkpoint.Kinds[kind], Numel: to - from}
				if s.copies != nil {
					shard.Values = s.copies[kind][at+from-lo : at+to-lo]
				} else {
					shard.Read = func(start int64, dst []float32) error { return s.fetch(x, kind, from+start, dst) }
				}
				s.shards = append(s.shards, shard)
			}
			first += p.Numel()
		}
		at += hi - lo
	}
	return nil
}

// fetch copies elements [lo, lo+len(dst)) of a portion to the host: weights or moments, by kind.
func (s *saver) fetch(x *Stored, kind int, lo int64, dst []float32) error {
	n := int64(len(dst))
	if err := device.CopyAnywhere(s.dev, s.stream, tensor.OfFloat32(dst, n), x.slice(kind, lo, lo+n)); err != nil {
		return err
	}
	return s.stream.Sync()
}

// ready returns an error if this run must not write checkpoints any more, because another job owns
// the folder. Collective.
func (s *saver) ready() (err error) {
	if s.mesh.World.Rank() == 0 && s.Check != nil {
		err = s.Check()
	}
	return agree(s.mesh.World, err)
}

// begin copies the training state and starts a goroutine that writes the copy. Without a copy, it
// returns after this rank's file is written. Collective.
func (s *saver) begin(step, updates int64, best *checkpoint.Best) error {
	dir := checkpoint.Dir(s.Dir)
	var err error
	if s.mesh.World.Rank() == 0 {
		err = dir.Begin(step)
	}
	if err = agree(s.mesh.World, err); err != nil {
		return err
	}
	s.next, s.began = checkpoint.Manifest{Step: step, Updates: updates, Best: best}, time.Now()
	for _, b := range s.model.Biases() {
		s.next.Biases = append(s.next.Biases, checkpoint.Vector{Name: b.Name, Values: slices.Clone(b.Values)})
	}
	s.written, s.done = make(chan written, 1), nil
	if s.copies == nil {
		return agreeAfter(s.mesh.World, func() error { s.written <- s.write(step); return nil })
	}
	if err := s.copy(); err != nil {
		s.written = nil
		return err
	}
	go func(to chan written) { to <- s.write(step) }(s.written)
	return nil
}

// copy copies the training state to the host.
func (s *saver) copy() error {
	at := int64(0)
	for i := range s.stored {
		x := &s.stored[i]
		lo, hi := x.shard()
		for kind := range s.copies {
			if lo == hi {
				continue
			}
			if err := s.dev.Copy(s.stream, tensor.OfFloat32(s.copies[kind][at:at+hi-lo], hi-lo),
				x.slice(kind, lo, hi)); err != nil {
				return err
			}
		}
		at += hi - lo
	}
	return s.stream.Sync()
}

// write writes this rank's file and, on rank 0, the model folder's files.
func (s *saver) write(step int64) (w written) {
	dir, rank := checkpoint.Dir(s.Dir), s.mesh.World.Rank()
	if w.file, w.err = dir.Write(step, rank, s.shards); w.err == nil && rank == 0 {
		w.model, w.err = dir.WriteModel(step, s.Model)
	}
	return w
}

// writing reports whether this rank is still writing its file. It returns false after a failed
// write; finish returns the error on all ranks.
func (s *saver) writing() bool {
	if s.written == nil || s.done != nil {
		return false
	}
	select {
	case w := <-s.written:
		s.done = &w
		return false
	default:
		return true
	}
}

// finish waits for the files of all ranks and completes the checkpoint. If a file could not be
// written it removes the checkpoint. Collective.
func (s *saver) finish() error {
	if s.written == nil {
		return nil
	}
	world := s.mesh.World
	err := agreeAfter(world, func() error { // a rank may write for much longer than another
		if s.done == nil {
			w := <-s.written
			s.done = &w
		}
		return s.done.err
	})
	w := *s.done
	s.written, s.done = nil, nil
	if err != nil {
		if world.Rank() == 0 {
			// Files that cannot be removed do not have the name of a checkpoint.
			checkpoint.Dir(s.Dir).Clean()
		}
		return err
	}
	n := int64(world.Size())
	all, own := make([]int64, 2*n), []int64{w.file.Bytes, int64(w.file.CRC32C)}
	counts := make([]int64, n)
	for i := range counts {
		counts[i] = 1
	}
	if err := world.AllGather(nil, tensor.OfInt64(all, n, 2), tensor.OfInt64(own, 1, 2), counts); err != nil {
		return err
	}
	var left error
	if world.Rank() == 0 {
		m := s.next
		m.Base, m.Frozen, m.Stages = s.Base, s.frozen, s.stages
		m.Run, m.Settings, m.Kinds, m.Groups, m.Model = s.Run, s.settings, s.kinds,
			shardsOf(s.weights.Portions(), s.mesh), w.model
		ring := ""
		if s.mesh.Ring > 1 {
			ring = fmt.Sprintf(", ring %d", s.mesh.Ring)
		}
		experts := ""
		if s.mesh.Expert != nil {
			experts = fmt.Sprintf(", experts %d", s.mesh.Expert.Size())
		}
		m.Mesh = fmt.Sprintf("%d ranks, ulysses %d%s, data %d%s", world.Size(), s.mesh.Ulysses, ring,
			s.mesh.Replicas, experts)
		for r := range int(n) {
			m.Files = append(m.Files,
				checkpoint.File{Name: checkpoint.FileName(r), Bytes: all[2*r], CRC32C: uint32(all[2*r+1])})
		}
		left, err = checkpoint.Dir(s.Dir).Finish(&m, int(s.Keep), s.replaced)
	}
	if err = agree(world, err); err != nil && world.Rank() == 0 {
		checkpoint.Dir(s.Dir).Clean()
	}
	if err == nil { // this checkpoint has replaced the one of its step
		s.replaced = slices.DeleteFunc(s.replaced, func(step int64) bool { return step == s.next.Step })
	}
	if err == nil && s.next.Best != nil {
		s.kept = s.next.Best.Saved
	}
	if err == nil && s.saved != nil {
		s.saved(time.Since(s.began))
	}
	if left != nil && err == nil && s.left != nil {
		s.left(left)
	}
	return err
}
