package main

import (
	"slices"

	"ulysses/comm"
	"ulysses/tensor"
	"ulysses/testkit/slowlinks"
)

// levels times the all-to-all directly and with two levels, on virtual nodes (--nodes) or on the
// nodes of the ranks, and prints what a rank sends. On virtual nodes it also prints the times of
// the cost model.
func levels(o *options) error {
	c, size := o.world, o.world.Size()
	nodeOf, err := comm.Nodes(c)
	if err != nil {
		return err
	}
	if o.nodes > 1 {
		for r := range nodeOf {
			nodeOf[r] = r * o.nodes / size
		}
	}
	nodes := slices.Max(nodeOf) + 1
	two, err := comm.NewTwoLevel(c, nodeOf)
	if err != nil {
		return err
	}
	inside := o.inside()
	link := func(l slowlinks.Links) comm.Link {
		return comm.Link{Latency: l.Latency.Seconds(), Overhead: l.Overhead.Seconds(), Bandwidth: l.Bandwidth}
	}
	model := comm.Links{Inside: link(inside), Between: link(o.links), CopyBandwidth: 10e9}
	for _, bytes := range o.sizes() {
		block := bytes / int64(size)
		rows, equal := make([]int64, size), func(int, int) int64 { return block }
		for j := range rows {
			rows[j] = block
		}
		src, dst := make([]float32, bytes/4), make([]float32, bytes/4)
		x, y := tensor.Of(tensor.OfFloat32(src, bytes/4).Data, tensor.U8, bytes),
			tensor.Of(tensor.OfFloat32(dst, bytes/4).Data, tensor.U8, bytes)
		direct, twice := model.AllToAllSeconds(nodes, size/nodes, bytes)
		traffic, err := comm.TwoLevelTraffic(c.Rank(), nodeOf, equal)
		if err != nil {
			return err
		}
		for _, way := range []struct {
			name  string
			c     comm.Comm
			model float64
			sent  comm.Traffic
		}{{"direct", c, direct, comm.DirectTraffic(c.Rank(), nodeOf, equal)}, {"two levels", two, twice, traffic}} {
			times, err := measure(o.repeat, func() { _ = c.Barrier() },
				func() error { return way.c.AllToAll(nil, y, x, rows, rows) })
			if err != nil {
				return err
			}
			if err := slowest(c, times); err != nil {
				return err
			}
			if c.Rank() != 0 {
				continue
			}
			more := map[string]any{"bytes": bytes, "ranks": size, "nodes": nodes,
				"between_messages": way.sent.BetweenMessages, "between_bytes": way.sent.BetweenBytes,
				"inside_bytes": way.sent.InsideBytes}
			if o.nodes > 1 {
				more["model_s"] = way.model
			}
			emit(way.name, times, "GB/s", float64(bytes), more)
		}
	}
	return nil
}
