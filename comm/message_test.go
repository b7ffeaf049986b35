package comm

import (
	"strings"
	"testing"
	"time"

	"ulysses/internal/flight"
)

// Messages between two ranks, which Align sends for a trace, do not shift the numbers of the group:
// the diagnosis of a later call names the rank that has not made it.
func TestMessagesAndDiagnosis(t *testing.T) {
	dir := t.TempDir()
	err := RunLocal(4, func(c Comm) error {
		r := flight.New(c.Rank(), c.Size(), "n0")
		if err := r.Attach(dir); err != nil {
			return err
		}
		w := NewWatch(0, "n0", nil)
		w.Record(r)
		world := NewCounted(c, "world", nil, nil, w)
		if err := world.Barrier(); err != nil {
			return err
		}
		if _, err := Align(world, func() time.Duration { return 0 }); err != nil {
			return err
		}
		for range 3 {
			if err := Agree(world, nil); err != nil {
				return err
			}
		}
		if c.Rank() == 2 {
			return nil
		}
		w.begin(activeCall{op: OpBarrier, rank: c.Rank(), seq: *world.seq + 1, group: world.group}) // waits for rank 2
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	ranks, err := flight.ReadFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	d := flight.Diagnose(ranks)
	if want := "rank 2 on host n0 is late; 3 ranks wait for it in barrier #5 on axis world (ranks 0 to 3)"; !strings.HasPrefix(
		d.Text, want) {
		t.Errorf("%s\nwant %s", d.Text, want)
	}
	messages := map[flight.Group]int64{}
	for _, call := range ranks[2].Calls {
		if call.Op == OpSendRecv {
			messages[call.Group] = call.Seq
		}
	}
	if pair := (flight.Group{Axis: "world", First: 0, Stride: 2, Size: 2}); len(messages) != 1 ||
		messages[pair] != 2*alignRounds {
		t.Errorf("messages of rank 2: %v, want %d in %v", messages, 2*alignRounds, pair)
	}
}
