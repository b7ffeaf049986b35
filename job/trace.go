package job

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/internal/trace"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/train"
)

// traced is what became of output.trace.
type traced struct {
	Path        string
	First, Last int64         // steps recorded
	Spans, Lost int64         // of all ranks
	Within      time.Duration // how well the ranks' clocks are known at the worst
}

// newTrace prepares to record the steps of output.trace; nil when there are none.
func (s *session) newTrace() *train.Trace {
	steps := s.Job.Output.Trace
	if len(steps) == 0 {
		return nil
	}
	r := trace.New(trace.Capacity)
	r.Device = s.Device.Info().Kind
	return train.NewTrace(steps[0], steps[1], r, s.Clock, s.Mesh.World, s.parts.Model.Groups())
}

// origin of a trace: the first rank's, to which the others fit their own.
type traceOrigin struct {
	Host string
	Base int64 // of its recorder, Unix nanoseconds
	Zero time.Duration
}

// writeTrace brings the ranks' spans to rank 0, which writes trace.json; nil where no step of the
// range was run. Collective.
func (s *session) writeTrace() (*traced, error) {
	t := s.trainer.Trace
	if t == nil || t.Steps[1] == 0 {
		return nil, nil
	}
	host, _ := os.Hostname()
	world := s.Mesh.World
	own, err := json.Marshal(traceOrigin{host, t.Recorder.Base.UnixNano(), t.Begun.At})
	if err != nil {
		return nil, status.Errorf(status.Internal, "output.trace: %w", err)
	}
	if own, err = comm.BroadcastBytes(world, own, 0); err != nil {
		return nil, err
	}
	var root traceOrigin
	if err := json.Unmarshal(own, &root); err != nil {
		return nil, status.Errorf(status.Internal, "output.trace: %w", err)
	}
	at, within := timeline(t, root, host)
	counts := []int64{int64(len(t.Recorder.Spans())), t.Recorder.Lost()}
	worst := []int64{int64(within)}
	if err := world.AllReduce(nil, tensor.OfInt64(counts, 2), comm.Sum); err != nil {
		return nil, err
	}
	if err := world.AllReduce(nil, tensor.OfInt64(worst, 1), comm.Max); err != nil {
		return nil, err
	}
	x := &traced{Path: filepath.Join(s.Job.Output.Dir, file.TraceFile), First: t.Steps[0], Last: t.Steps[1], Spans: counts[0], Lost: counts[1],
		Within: time.Duration(worst[0])}
	label := "the first rank's clock"
	if within > 0 {
		label = fmt.Sprintf("clock within %v of the first rank's", within.Round(100*time.Nanosecond))
	}
	events := t.Recorder.Events(nil, world.Rank(), host, label, at)
	if world.Rank() > 0 {
		if err := sendBytes(world, events); err != nil {
			return nil, err
		}
		return x, comm.Agree(world, nil)
	}
	var lost error
	received := false
	write := func(w io.Writer) (err error) {
		received = true
		err, lost = s.writeEvents(w, events, x)
		return err
	}
	if err = s.mayWrite(file.TraceFile); err == nil {
		err = tensor.WriteFile(x.Path, write)
	}
	if !received { // the file cannot be written, but the peers still send
		write(io.Discard)
	}
	if lost != nil {
		return nil, lost // no peer to agree with
	}
	return x, comm.Agree(world, err)
}

// timeline is how a time of this rank's recorder becomes one of the file's, which begins at zero,
// and how far that may be off. Where the ranks turn out to share a machine's clock it is taken as
// it is; elsewhere what was measured before the first step and behind the last one counts, and in
// between a straight line.
func timeline(t *train.Trace, root traceOrigin, host string) (at func(time.Duration) time.Duration, within time.Duration) {
	shared := time.Duration(t.Recorder.Base.UnixNano() - root.Base)
	const slack = 20 * time.Microsecond // between two readings of a clock that is being disciplined
	same := host == root.Host
	for _, m := range []train.Aligned{t.Begun, t.Ended} {
		d := shared - m.Offset
		same = same && (m.Alignment == comm.Alignment{} || d <= m.Within+slack && -d <= m.Within+slack)
	}
	if same {
		return func(d time.Duration) time.Duration { return d + shared - root.Zero }, 0
	}
	drift := float64(t.Ended.Offset-t.Begun.Offset) / math.Max(1, float64(t.Ended.At-t.Begun.At))
	return func(d time.Duration) time.Duration {
		return d + t.Begun.Offset + time.Duration(drift*float64(d-t.Begun.At)) - root.Zero
	}, max(t.Begun.Within, t.Ended.Within)
}

// writeEvents writes the file on rank 0. After a write error it goes on receiving, so that no peer
// is left waiting; lost is an error of the communicator.
func (s *session) writeEvents(w io.Writer, own []byte, x *traced) (err, lost error) {
	put := func(b ...[]byte) {
		for _, part := range b {
			if err == nil {
				_, err = w.Write(part)
			}
		}
	}
	put([]byte(trace.Header), own)
	for r := 1; r < s.Mesh.World.Size(); r++ {
		put([]byte(trace.Comma))
		if lost = receiveBytes(s.Mesh.World, r, put); lost != nil {
			return err, lost
		}
	}
	end, e := trace.Footer(x.about(s))
	if e != nil {
		return e, nil
	}
	put(end)
	return err, nil
}

// about is what the file says of itself.
func (x *traced) about(s *session) map[string]string {
	about := map[string]string{
		"program": programVersion(),
		"steps":   fmt.Sprintf("%d to %d", x.First, x.Last),
		"ranks":   fmt.Sprint(s.Mesh.World.Size()),
		"device":  s.Device.Info().Name,
		"clocks":  x.clocks(),
		"lost":    fmt.Sprintf("%d spans did not fit and are not here", x.Lost),
	}
	if s.Device.Info().Kind != "cpu" {
		about["times"] = "when the host enqueued: what runs on the device runs later"
	}
	return about
}

// print says where the trace is and what is not in it.
func (x *traced) print(s *session) {
	switch {
	case x != nil:
		fmt.Fprintf(s.Stdout, "trace            %s: steps %d to %d, %d spans, %s\n", x.Path, x.First, x.Last, x.Spans, x.clocks())
		if x.Lost > 0 {
			fmt.Fprintf(s.Stdout, "                 %d spans did not fit: trace fewer steps\n", x.Lost)
		}
	case s.trainer.Trace != nil:
		fmt.Fprintf(s.Stdout, "trace            none: this run took no step from %d to %d\n", s.trainer.Trace.First, s.trainer.Trace.Last)
	}
}

func (x *traced) clocks() string {
	if x.Within == 0 {
		return "one clock for all ranks"
	}
	return fmt.Sprintf("every rank's within %v of the first one's", x.Within.Round(100*time.Nanosecond))
}

// tracePiece is how much of a trace travels at a time.
const tracePiece = 1 << 20

// sendBytes sends to rank 0, the length first.
func sendBytes(c comm.Comm, b []byte) error {
	if err := c.SendRecv(nil, tensor.Tensor{}, -1, tensor.OfInt64([]int64{int64(len(b))}, 1), 0); err != nil {
		return err
	}
	for len(b) > 0 {
		n := min(len(b), tracePiece)
		if err := c.SendRecv(nil, tensor.Tensor{}, -1, bytesTensor(b[:n]), 0); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// receiveBytes hands on what a rank sends, piece by piece.
func receiveBytes(c comm.Comm, from int, to func(...[]byte)) error {
	length := []int64{0}
	if err := c.SendRecv(nil, tensor.OfInt64(length, 1), from, tensor.Tensor{}, -1); err != nil {
		return err
	}
	piece := make([]byte, min(length[0], tracePiece))
	for left := length[0]; left > 0; left -= int64(len(piece)) {
		piece = piece[:min(left, tracePiece)]
		if err := c.SendRecv(nil, bytesTensor(piece), from, tensor.Tensor{}, -1); err != nil {
			return err
		}
		to(piece)
	}
	return nil
}

func bytesTensor(b []byte) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(b)), tensor.U8, int64(len(b)))
}
