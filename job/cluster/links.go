package cluster

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/tensor"
)

// Link is the bandwidth between two ranks, in each direction while both send.
type Link struct {
	A, B  int
	Bytes float64 // per second
}

const (
	slowLink     = 0.5 // share of the median below which a link is named
	fewRanks     = 16  // up to this number, every pair of ranks is measured, not of nodes
	warmUpBytes  = 1 << 20
	messageBytes = 4 << 20
	slowWarmUp   = 100 * time.Millisecond // of a link that is not measured again
	clockLimit   = 1.0                    // seconds
)

// clocks compares the clock of each node with rank 0's. The node's first rank answers, because
// ranks of a node have one clock. Of several round trips, the shortest is the most exact.
func (r *Report) clocks(c comm.Comm, s *Subject) error {
	now := s.now
	if now == nil {
		now = time.Now
	}
	buffer := make([]int64, 1)
	t := tensor.OfInt64(buffer, 1)
	answer := func(rank int) (err error) {
		for range 5 {
			if err = c.SendRecv(nil, t, 0, tensor.Tensor{}, -1); err == nil {
				buffer[0] = now().UnixNano()
				err = c.SendRecv(nil, tensor.Tensor{}, -1, t, 0)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	ask := func(rank int) error {
		best := math.Inf(1)
		for range 5 {
			began := now()
			if err := c.SendRecv(nil, tensor.Tensor{}, -1, t, rank); err != nil {
				return err
			}
			if err := c.SendRecv(nil, t, rank, tensor.Tensor{}, -1); err != nil {
				return err
			}
			trip := now().Sub(began)
			if trip.Seconds() < best {
				best = trip.Seconds()
				middle := began.Add(trip / 2)
				r.Ranks[rank].ClockOff = time.Duration(buffer[0] - middle.UnixNano()).Seconds()
				r.Ranks[rank].ClockUncertainty = best / 2
			}
		}
		return nil
	}
	var err error
	for _, rank := range firsts(r.Ranks) {
		switch {
		case err != nil || rank == 0:
		case c.Rank() == 0:
			err = ask(rank)
		case c.Rank() == rank:
			err = answer(rank)
		}
	}
	if err != nil {
		return err
	}
	off := make([]float64, 2*len(r.Ranks))
	for i, f := range r.Ranks {
		off[2*i], off[2*i+1] = f.ClockOff, f.ClockUncertainty
	}
	if err := c.Broadcast(nil, tensor.OfFloat64(off, int64(len(off))), 0); err != nil {
		return err
	}
	for i := range r.Ranks {
		f := &r.Ranks[i]
		f.ClockOff, f.ClockUncertainty = off[2*i], off[2*i+1]
		if math.Abs(f.ClockOff)-f.ClockUncertainty > clockLimit {
			r.Findings = append(r.Findings,
				Finding{status.InvalidArgument, "clock",
					fmt.Sprintf(
						"the clock of %s differs by %+.3g s from that of %s; start NTP or chrony on both nodes",
						who(r.Ranks, i), f.ClockOff, who(r.Ranks, 0))})
		}
	}
	return nil
}

// rounds returns a schedule in which each of n members meets every other one once, and in a round
// each meets one at most, so that the pairs of a round do not disturb each other at their ends (the
// circle method).
func rounds(n int) (all [][][2]int) {
	even := n + n%2 // an odd number has a member that rests
	for round := range max(even-1, 0) {
		var pairs [][2]int
		for i := range even / 2 {
			a, b := (round+i)%(even-1), (round+even-1-i)%(even-1)
			if i == 0 {
				b = even - 1
			}
			if max(a, b) < n {
				pairs = append(pairs, [2]int{min(a, b), max(a, b)})
			}
		}
		all = append(all, pairs)
	}
	return all
}

// links measures all pairs of ranks if these are few, otherwise all pairs of nodes. After the
// budget, it measures no further pairs.
func (r *Report) links(c comm.Comm, s *Subject) error {
	members := firsts(r.Ranks)
	if c.Size() <= fewRanks {
		members = nil
		for rank := range c.Size() {
			members = append(members, rank)
		}
	}
	own, began, budget := []Link{}, time.Now(), cmp.Or(s.Budget, 30*time.Second)
	out, in := make([]byte, messageBytes), make([]byte, messageBytes)
	schedule := rounds(len(members))
	for i, round := range schedule {
		for _, pair := range round {
			a, b := members[pair[0]], members[pair[1]]
			if c.Rank() != a && c.Rank() != b {
				continue
			}
			x, err := bandwidth(c, a+b-c.Rank(), out, in)
			if err != nil {
				return err
			}
			if c.Rank() == a {
				own = append(own, Link{a, b, x})
			}
		}
		passed := []int64{int64(time.Since(began))} // all ranks stop together
		if err := c.AllReduce(nil, tensor.OfInt64(passed, 1), comm.Max); err != nil {
			return err
		}
		if time.Duration(passed[0]) > budget {
			for _, rest := range schedule[i+1:] {
				r.Unmeasured += len(rest)
			}
			break
		}
	}
	all, err := comm.GatherJSON(c, "doctor: links", own)
	if err != nil {
		return err
	}
	for _, some := range all {
		r.Links = append(r.Links, some...)
	}
	slices.SortFunc(r.Links, func(x, y Link) int { return cmp.Or(x.A-y.A, x.B-y.B) })
	r.Findings = append(r.Findings, slowLinks(r.Ranks, r.Links)...)
	if r.Unmeasured > 0 {
		r.Findings = append(r.Findings,
			Finding{status.OK, "links",
				fmt.Sprintf("%s were not measured, because %v had passed; check fewer nodes at once",
					units.Count(r.Unmeasured, "pair"), budget)})
	}
	return nil
}

// bandwidth returns the bytes per second that this rank and the peer send each other at once: the
// best of three messages. A link whose first message is slow is not measured again.
func bandwidth(c comm.Comm, peer int, out, in []byte) (float64, error) {
	exchange := func(n int) (float64, error) {
		began := time.Now()
		err := c.SendRecv(nil, bytesOf(in[:n]), peer, bytesOf(out[:n]), peer)
		return float64(n) / max(time.Since(began), time.Nanosecond).Seconds(), err
	}
	var best float64
	for range 2 { // the first opens the connection
		var err error
		if best, err = exchange(warmUpBytes); err != nil {
			return 0, err
		}
	}
	own, theirs := []float64{best}, []float64{0}
	if err := c.SendRecv(nil, tensor.OfFloat64(theirs, 1), peer, tensor.OfFloat64(own, 1), peer); err != nil {
		return 0, err
	}
	if slow := min(own[0], theirs[0]); slow < warmUpBytes/slowWarmUp.Seconds() {
		return slow, nil
	}
	for range 3 {
		x, err := exchange(messageBytes)
		if err != nil {
			return 0, err
		}
		best = max(best, x)
	}
	return best, nil
}

func bytesOf(x []byte) tensor.Tensor {
	return tensor.Of(unsafe.Pointer(unsafe.SliceData(x)), tensor.U8, int64(len(x)))
}

// slowLinks finds links that are slower than others of their kind, inside nodes or between nodes.
func slowLinks(all []Facts, links []Link) (found []Finding) {
	inside := func(l Link) bool { return all[l.A].Host == all[l.B].Host }
	kinds := map[bool][]float64{}
	for _, l := range links {
		kinds[inside(l)] = append(kinds[inside(l)], l.Bytes)
	}
	for _, l := range links {
		middle := median(kinds[inside(l)])
		if l.Bytes >= slowLink*middle {
			continue
		}
		fix := "check the cable, the port and the network variables of both nodes, or leave one of them out"
		if inside(l) {
			fix = "look for other processes on the node and its cores"
		}
		found = append(found,
			Finding{status.Comm, "slow link",
				fmt.Sprintf("%s and %s: %sB/s in each direction, the median of such links is %sB/s; %s",
					who(all, l.A), who(all, l.B), units.Spaced(l.Bytes), units.Spaced(middle), fix)})
	}
	return found
}
