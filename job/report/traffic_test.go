package report

import (
	"slices"
	"testing"

	"ulysses/comm"
	"ulysses/train"
)

// Two ranks whose bytes differ from the formula by the same amount in opposite directions are
// reported as not equal.
func TestTrafficIsHeldRankByRank(t *testing.T) {
	facts := make([]rankFacts, 2)
	for r := range facts {
		facts[r].Sent = []comm.Entry{{Axis: "world", Op: comm.OpAllReduce, Calls: 1, Bytes: int64(10 + 2*r)},
			{Axis: "world", Op: comm.OpAllReduce, Control: true, Calls: 3, Bytes: 5},
			{Axis: "data", Op: comm.OpBroadcast, Calls: 1, Bytes: 4}}
		facts[r].Formula = []train.Traffic{{Axis: "world", Op: comm.OpAllReduce, What: "gradients", Bytes: 11},
			{Axis: "sequence", Op: comm.OpAllToAll}}
	}
	rows := trafficRows(facts)
	want := []trafficRow{
		{Axis: "world", Op: comm.OpAllReduce, What: "gradients", Calls: 1, Sent: 22, Formula: 22, Least: 10, Most: 12},
		{Axis: "data", Op: comm.OpBroadcast, Calls: 1, Sent: 8, Least: 4, Most: 4},
		{Axis: "all", Op: "control", What: rows[len(rows)-1].What, Calls: 3, Sent: 10, Control: true},
	}
	if !slices.Equal(rows, want) {
		t.Errorf("%+v", rows)
	}
	if v := trafficVerdict(2, rows); v.Value != "NOT EQUAL" ||
		v.Note != "all-reduce on axis world: the bytes sent differ from the formula" {
		t.Errorf("%v", v)
	}
}
