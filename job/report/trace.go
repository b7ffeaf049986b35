package report

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
	"ulysses/job/assembly"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/train"
)

// traceFile describes the trace.json that was written.
type traceFile struct {
	Path        string
	First, Last int64 // steps recorded
	Spans, Lost int64 // of all ranks; lost spans did not fit into the recorder
	// the largest error of the clock of a rank; 0 = all ranks share a clock
	Within time.Duration
}

// NewTrace returns the recorder for the steps of output.trace; nil if the job sets none.
func NewTrace(p *assembly.Parts) *train.Trace {
	steps := p.Job.Output.Trace
	if len(steps) == 0 {
		return nil
	}
	r := trace.New(trace.Capacity)
	r.Device = p.Device.Info().Kind
	return train.NewTrace(steps[0], steps[1], r, p.Clock, p.Mesh.World, p.Model.Groups())
}

// traceOrigin is the time 0 of a trace, by the clock of rank 0. The other ranks convert their times
// to it.
type traceOrigin struct {
	Host string
	Base int64 // start of rank 0's recorder, in Unix nanoseconds
	Zero time.Duration
}

// writeTrace gathers the spans of all ranks on rank 0, which writes trace.json. It returns nil if
// no step of output.trace was run. Collective.
func (r *Run) writeTrace() (*traceFile, error) {
	t := r.Trainer.Trace
	if t == nil || t.Steps[1] == 0 {
		return nil, nil
	}
	host, _ := os.Hostname()
	world := r.world()
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
	x := &traceFile{Path: filepath.Join(r.job().Output.Dir, file.TraceFile), First: t.Steps[0], Last: t.Steps[1],
		Spans: counts[0], Lost: counts[1],
		Within: time.Duration(worst[0])}
	label := "clock of rank 0"
	if within > 0 {
		label = fmt.Sprintf("clock within %v of rank 0's", within.Round(100*time.Nanosecond))
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
		err, lost = r.writeEvents(w, events, x)
		return err
	}
	if err = r.Check(file.TraceFile); err == nil {
		err = tensor.WriteFile(x.Path, write)
	}
	if !received { // the file cannot be written, but the other ranks still send
		write(io.Discard)
	}
	if lost != nil {
		return nil, lost // communication has failed: the ranks cannot agree
	}
	return x, comm.Agree(world, err)
}

// timeline returns the function that converts a time of this rank's recorder to a time of the file,
// and the largest error of that function. If this rank shares the clock of rank 0's machine, the
// difference of the two recorders' starts is exact. Otherwise the function interpolates linearly
// between the offsets that were measured before the first step and after the last.
func timeline(t *train.Trace, root traceOrigin, host string) (at func(time.Duration) time.Duration,
	within time.Duration) {
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

// writeEvents writes the file on rank 0. After a write error it continues to receive, so that no
// rank waits for it; lost is an error of the communicator.
func (r *Run) writeEvents(w io.Writer, own []byte, x *traceFile) (err, lost error) {
	put := func(blocks ...[]byte) {
		for _, b := range blocks {
			if err == nil {
				_, err = w.Write(b)
			}
		}
	}
	put([]byte(trace.Header), own)
	for rank := 1; rank < r.world().Size(); rank++ {
		put([]byte(trace.Comma))
		if lost = receiveBytes(r.world(), rank, put); lost != nil {
			return err, lost
		}
	}
	end, e := trace.Footer(r.aboutTrace(x))
	if e != nil {
		return e, nil
	}
	put(end)
	return err, nil
}

// aboutTrace returns the metadata of the file.
func (r *Run) aboutTrace(x *traceFile) map[string]string {
	info := r.Parts.Device.Info()
	about := map[string]string{
		"program": r.Program,
		"steps":   fmt.Sprintf("%d to %d", x.First, x.Last),
		"ranks":   fmt.Sprint(r.world().Size()),
		"device":  info.Name,
		"clocks":  x.clocks(),
		"lost":    fmt.Sprintf("%d spans did not fit and are missing", x.Lost),
	}
	if info.Kind != "cpu" {
		about["times"] = "when the host enqueued the work; the device executes it later"
	}
	return about
}

// printTrace prints the path of the trace and the number of spans that did not fit. If output.trace
// names steps that this run did not do, it prints that there is no trace.
func (r *Run) printTrace(x *traceFile) {
	switch t := r.Trainer.Trace; {
	case x != nil:
		fmt.Fprintf(r.Stdout, "trace            %s: steps %d to %d, %d spans, %s\n", x.Path, x.First, x.Last, x.Spans,
			x.clocks())
		if x.Lost > 0 {
			fmt.Fprintf(r.Stdout, "                 %d spans did not fit: set fewer steps in output.trace\n", x.Lost)
		}
	case t != nil:
		fmt.Fprintf(r.Stdout, "trace            none: output.trace = [%d, %d], and this run did no step of these\n",
			t.First, t.Last)
	}
}

func (x *traceFile) clocks() string {
	if x.Within == 0 {
		return "one clock for all ranks"
	}
	return fmt.Sprintf("clocks within %v of rank 0's", x.Within.Round(100*time.Nanosecond))
}

// traceBlock is the largest number of bytes of a trace in one message.
const traceBlock = 1 << 20

// sendBytes sends bytes to rank 0, first their number.
func sendBytes(c comm.Comm, b []byte) error {
	if err := c.SendRecv(nil, tensor.Tensor{}, -1, tensor.OfInt64([]int64{int64(len(b))}, 1), 0); err != nil {
		return err
	}
	for len(b) > 0 {
		n := min(len(b), traceBlock)
		if err := c.SendRecv(nil, tensor.Tensor{}, -1, bytesTensor(b[:n]), 0); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// receiveBytes receives the bytes that a rank sends with sendBytes, and calls to with each block.
func receiveBytes(c comm.Comm, from int, to func(...[]byte)) error {
	length := []int64{0}
	if err := c.SendRecv(nil, tensor.OfInt64(length, 1), from, tensor.Tensor{}, -1); err != nil {
		return err
	}
	block := make([]byte, min(length[0], traceBlock))
	for left := length[0]; left > 0; left -= int64(len(block)) {
		block = block[:min(left, traceBlock)]
		if err := c.SendRecv(nil, bytesTensor(block), from, tensor.Tensor{}, -1); err != nil {
			return err
		}
		to(block)
	}
	return nil
}

func bytesTensor(b []byte) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(b)), tensor.U8, int64(len(b)))
}
