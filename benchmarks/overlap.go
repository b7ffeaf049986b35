package main

import (
	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/testkit/slowlinks"
)

// slowed returns c with the links of --link-latency and --link-bandwidth, or c without them.
func (o *options) slowed(c comm.Comm) (comm.Comm, error) {
	if o.links == (slowlinks.Links{}) {
		return c, nil
	}
	if o.nodes > 1 {
		return slowlinks.NewOnNodes(c, c.Rank()*o.nodes/c.Size(), o.inside(), o.links, nil)
	}
	return slowlinks.New(c, o.links, nil)
}

// inside returns the links inside a virtual node: a tenth of the latency and overhead between
// nodes, and ten times the bandwidth.
func (o *options) inside() slowlinks.Links {
	return slowlinks.Links{Latency: o.links.Latency / 10, Overhead: o.links.Overhead / 10,
		Bandwidth: 10 * o.links.Bandwidth}
}

// overlap times matrix products and an all-to-all: each alone, one after the other, and with the
// products between the start of the all-to-all and its wait.
func overlap(o *options) error {
	d, stream, err := opened(cpu.New(cpu.Options{Workers: max(1, o.threads/o.world.Size())}))
	if err != nil {
		return err
	}
	defer d.Close()
	const side, products = 256, 32
	size := int64(o.world.Size())
	for _, bytes := range o.sizes() {
		block := bytes / 4 / size
		var a, b, c, src, dst tensor.Tensor
		free, err := build(d, func(m arena) {
			a, b, c = m.random(tensor.F32, side, side), m.random(tensor.F32, side, side),
				m.alloc(tensor.F32, side, side)
			src, dst = m.random(tensor.F32, block*size), m.alloc(tensor.F32, block*size)
		})
		if err != nil {
			return err
		}
		rows := make([]int64, size)
		for j := range rows {
			rows[j] = block
		}
		compute := func() error {
			for range products {
				if err := d.Gemm(stream, &device.Gemm{A: a, B: b, C: c}); err != nil {
					return err
				}
			}
			return nil
		}
		move := func() error { return o.world.AllToAll(stream, dst, src, rows, rows) }
		for _, way := range []struct {
			name string
			run  func() error
		}{{"computation", compute}, {"communication", move}, {"in turn", inOrder(move, compute)},
			{"overlapped", func() error {
				r, err := o.world.AllToAllStart(stream, dst, src, rows, rows)
				if err != nil {
					return err
				}
				return inOrder(compute, r.Wait)()
			}}} {
			if err := o.overlapWay(way.name, bytes, way.run); err != nil {
				return err
			}
		}
		free()
	}
	return nil
}

// overlapWay times one way on all ranks.
func (o *options) overlapWay(name string, bytes int64, run func() error) error {
	times, err := measure(o.repeat, func() { _ = o.world.Barrier() }, run)
	if err != nil {
		return err
	}
	if err := slowest(o.world, times); err != nil {
		return err
	}
	if o.world.Rank() == 0 {
		emit(name, times, "GB/s", float64(bytes),
			map[string]any{"bytes": bytes, "ranks": o.world.Size(), "threads": o.threads,
				"latency_s": o.links.Latency.Seconds(), "bandwidth": o.links.Bandwidth})
	}
	return nil
}

// layerOverlap times a pass of a decoder layer on the CPU, forward and backward, plain and with
// projections that overlap with all-to-alls. The two take turns.
func layerOverlap(o *options) error {
	d, stream, err := opened(cpu.New(cpu.Options{Workers: max(1, o.threads/o.world.Size())}))
	if err != nil {
		return err
	}
	defer d.Close()
	s := shape{Tokens: 2048, Hidden: 512, FFN: 1024, Heads: 8, KVHeads: 8, HeadDim: 64}
	var layers [2]*layered
	for i := range layers {
		own := *o
		own.overlapped = i == 1
		if layers[i], err = own.layered(d, stream, o.world, s, 1); err != nil {
			return err
		}
		defer layers[i].close()
	}
	names, times := [2]string{"plain", "overlapped"}, [2][]float64{}
	for range o.repeat + 1 { // the first is not timed
		for i, l := range layers {
			_ = o.world.Barrier()
			t, err := seconds(l.pass)
			if err != nil {
				return err
			}
			times[i] = append(times[i], t)
		}
	}
	for i := range names {
		each := times[i][1:]
		if err := slowest(o.world, each); err != nil {
			return err
		}
		if o.world.Rank() == 0 {
			emit(names[i], each, "tokens/ns", float64(s.Tokens),
				map[string]any{"ranks": o.world.Size(), "threads": o.threads,
					"latency_s": o.links.Latency.Seconds(), "bandwidth": o.links.Bandwidth})
		}
	}
	return nil
}

// checkLinks returns an error unless both flags of the links are given, or none.
func (o *options) checkLinks() error {
	if o.nodes < 1 || o.ranks%o.nodes != 0 || o.nodes > 1 && o.links.Bandwidth <= 0 {
		return status.Errorf(status.InvalidArgument,
			"--nodes %d with --ranks %d: give a divisor of the ranks, and with several nodes --link-latency and --link-bandwidth",
			o.nodes, o.ranks)
	}
	if (o.links.Bandwidth > 0) != (o.links.Latency > 0) || o.links.Bandwidth < 0 || o.links.Latency < 0 {
		return status.Errorf(status.InvalidArgument,
			"--link-latency %v and --link-bandwidth %v: give both, above 0, or none", o.links.Latency,
			o.links.Bandwidth)
	}
	return nil
}
