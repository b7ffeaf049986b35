package dryrun

import (
	"math"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/tensor"
)

type noSizes struct{}

func (noSizes) AttentionWorkspace(*device.Attention, bool) int64            { return 0 }
func (noSizes) GatedDeltaSizes(*device.GatedDelta) (none device.DeltaSizes) { return none }

// slow has a rate of 1 per second for each kind of work.
var slow = Rates{Products: 1, Attention: 1, Gradient: 1, Delta: 1, Memory: 1, Copies: 1, Node: 1, Network: 1,
	PerNode: 2}

func open(t *testing.T, place tensor.Place, rates Rates, c *clock.Clock) *Device {
	t.Helper()
	d, err := Open(device.Info{Place: place, Align: 64}, noSizes{}, rates, c)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func of(place tensor.Place, shape ...int64) tensor.Tensor {
	t := tensor.Of(nil, tensor.F32, shape...)
	t.Where = place
	return t
}

// visiblePairs returns the number that counting the pairs gives.
func TestVisiblePairs(t *testing.T) {
	for sq := int64(0); sq <= 7; sq++ {
		for sk := int64(0); sk <= 7; sk++ {
			for left := int64(-1); left <= 4; left++ {
				for right := int64(-1); right <= 4; right++ {
					for _, causal := range []bool{false, true} {
						for _, shift := range []int64{sk - sq, 0, 3, -2, 100, -100} {
							want := 0.0
							for i := range sq {
								for j := range sk {
									at := i + shift
									if (!causal || j <= at) && (left < 0 || j >= at-left) &&
										(right < 0 || j <= at+right) {
										want++
									}
								}
							}
							a := device.Attention{Causal: causal, Window: &device.Window{Left: left, Right: right}}
							if got := visiblePairs(&a, sq, sk, shift); got != want {
								t.Errorf("%d queries, %d keys, window [%d, %d], causal %v, shift %d: %v pairs, want %v",
									sq, sk, left, right, causal, shift, got, want)
							}
						}
					}
				}
			}
		}
	}
	a := device.Attention{Causal: true}
	if n := int64(1) << 31; visiblePairs(&a, n, n, 0) != float64(n)*float64(n+1)/2 {
		t.Errorf("%v pairs of 2^31 tokens", visiblePairs(&a, n, n, 0))
	}
}

// The shift of a document counts from the rows of all documents, as in device.Attention: here the
// second document's first query, row 2, is aligned with its third key, row 4.
func TestShiftedDocuments(t *testing.T) {
	a := device.Attention{Q: of(tensor.CUDA, 4, 1, 1), K: of(tensor.CUDA, 7, 1, 1), V: of(tensor.CUDA, 7, 1, 1),
		Causal: true, CuQ: []int64{0, 2, 4}, CuK: []int64{0, 2, 7}}
	for _, c := range []struct {
		shift []int64
		pairs float64
	}{{nil, 1 + 2 + 4 + 5}, {[]int64{0, 2}, 1 + 2 + 3 + 4}, {[]int64{-1, 3}, 0 + 1 + 4 + 5}, {[]int64{5, -5}, 2 + 2}} {
		if a.Shift = c.shift; attentionFlops(&a) != 4*c.pairs {
			t.Errorf("shift %v: %v FLOP, want %v", c.shift, attentionFlops(&a), 4*c.pairs)
		}
	}
}

// Started all-to-alls of a GPU overlap with the stream's operations and follow each other. On a CPU
// they take the processor's time.
func TestStartedAllToAll(t *testing.T) {
	for _, c := range []struct {
		place tensor.Place
		want  float64
	}{{tensor.CUDA, 40 + max(80, 8+12) + 4 + 40 + max(4, 200) + 4},
		{tensor.Host, 40 + 8 + 12 + 80 + 4 + 40 + 200 + 4 + 4}} {
		d := open(t, c.place, slow, nil)
		m := NewMesh(d, 0, 2, 2, 1, 0, comm.NewLedger(), nil)
		s, _ := d.NewStream()
		start := func(rows int64) comm.Request {
			x := of(c.place, rows)
			r, err := m.Seq.AllToAllStart(s, x, x, []int64{0, rows}, []int64{0, rows})
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		_ = d.Fill(s, of(c.place, 10), 0) // before the all-to-alls, 40 s
		a, b := start(2), start(3)
		_ = d.Fill(s, of(c.place, 20), 0) // 80 s
		for _, r := range []comm.Request{a, b} {
			if err := r.Wait(); err != nil {
				t.Error(err)
			}
		}
		_ = d.Fill(s, of(c.place, 1), 0)
		_ = d.Fill(s, of(c.place, 10), 0)
		late := start(50)
		_ = d.Fill(s, of(c.place, 1), 0)
		if err := late.Wait(); err != nil {
			t.Error(err)
		}
		_ = d.Fill(s, of(c.place, 1), 0)
		x := d.Spent()
		if x.Seconds != c.want || x.Node != 4*55 || x.Waits[""] != 3 {
			t.Errorf("place %v: %+v, want %v s", c.place, x, c.want)
		}
	}
}

// The sequence axis and other axes have queues of their own for a link. While both have transfers,
// each of them has half the rate, so an all-to-all takes twice as long beside a gather of weights,
// and the gather and those behind it end later by the time of the all-to-all. Transfers over other
// links do not matter. Host calls and CPUs have no queues.
func TestLinksHaveQueues(t *testing.T) {
	for _, c := range []struct {
		place   tensor.Place
		perNode int   // 4: gather and all-to-all inside a node; 2: the gather also sends to other nodes
		gathers int   // each takes 30 rows of the link
		rows    int64 // of the all-to-all
		fill    int64 // after the all-to-all
		want    float64
	}{
		{tensor.CUDA, 4, 1, 2, 40, 4 * (2 + 2 + 40)}, {tensor.CUDA, 4, 1, 2, 0, 4 * (30 + 2)},
		{tensor.CUDA, 4, 1, 50, 1, 4 * (30 + 50 + 1)},
		{tensor.CUDA, 4, 2, 2, 40, 4 * (60 + 2)}, {tensor.CUDA, 2, 1, 20, 40, 4 * (15 + 20 + 40)},
		{tensor.Host, 4, 1, 2, 20, 4 * (30 + 2 + 20)},
	} {
		rates := slow
		rates.PerNode, rates.Network = c.perNode, 0.5
		d := open(t, c.place, rates, nil)
		m := NewMesh(d, 0, 4, 2, 1, 0, comm.NewLedger(), nil)
		weights, _ := d.NewStream()
		s, _ := d.NewStream()
		whole, x := of(c.place, 40), of(c.place, c.rows)
		for range c.gathers {
			if err := m.World.AllGather(weights, whole, whole.Slice(0, 0, 10), []int64{10, 10, 10, 10}); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Seq.AllToAll(s, x, x, []int64{0, c.rows}, []int64{0, c.rows}); err != nil {
			t.Fatal(err)
		}
		if c.fill > 0 {
			_ = d.Fill(s, of(c.place, c.fill), 0)
		}
		if got := d.Spent().Seconds; got != c.want {
			t.Errorf("%+v: %v s", c, got)
		}
	}
}

// A direct all-to-all pays for each message to another node. With two levels it takes the time of
// the model of the links, and sends the bytes of comm.TwoLevelTraffic.
func TestLevelsOfAllToAlls(t *testing.T) {
	rates := slow
	rates.PerNode, rates.Network, rates.Message = 2, 0.5, 7
	spent := func(two bool) Account {
		d := open(t, tensor.Host, rates, nil)
		m := NewMesh(d, 0, 4, 4, 1, 0, comm.NewLedger(), nil)
		m.Links = rates.Links()
		if two {
			if why, err := m.SetLevels("on", 32); err != nil || why == "" {
				t.Fatalf("%q, %v", why, err)
			}
		}
		s, _ := d.NewStream()
		x := of(tensor.Host, 8)
		if err := m.Seq.AllToAll(s, x, x, []int64{2, 2, 2, 2}, []int64{2, 2, 2, 2}); err != nil {
			t.Fatal(err)
		}
		return d.Spent()
	}
	block := 2 * of(tensor.Host, 1).Bytes()
	direct, levels := spent(false), spent(true)
	if want := 2*7 + 2*float64(block)/0.5; direct.Seconds != want || direct.Node != block || direct.Network != 2*block {
		t.Errorf("direct: %v s, %d and %d bytes, want %v s", direct.Seconds, direct.Node, direct.Network, want)
	}
	links := rates.Links()
	_, want := links.AllToAllSeconds(2, 2, 4*block)
	moved, err := comm.TwoLevelTraffic(0, []int{0, 0, 1, 1}, func(int, int) int64 { return block })
	if err != nil || levels.Seconds != want || levels.Node != moved.InsideBytes ||
		levels.Network != moved.BetweenBytes {
		t.Errorf("two levels: %v s, %d and %d bytes, want %v s, %+v, %v", levels.Seconds, levels.Node, levels.Network,
			want, moved, err)
	}
}

// An operation takes the longest of its arithmetic, its memory traffic and the minimum time.
func TestWork(t *testing.T) {
	spent := func(rates Rates, call func(d *Device, s device.Stream) error) float64 {
		d := open(t, tensor.CUDA, rates, nil)
		s, _ := d.NewStream()
		if err := call(d, s); err != nil {
			t.Fatal(err)
		}
		return d.Spent().Seconds
	}
	fast := slow
	fast.Memory = math.Inf(1)
	tiny := slow
	tiny.Products, tiny.Memory, tiny.Launch = math.Inf(1), math.Inf(1), 3
	g := &device.Gemm{A: of(tensor.CUDA, 2, 3), B: of(tensor.CUDA, 3, 5), C: of(tensor.CUDA, 2, 5)}
	added := *g
	added.Accumulate = true
	q := of(tensor.CUDA, 4, 6, 8)
	k := of(tensor.CUDA, 4, 2, 8)
	a := device.Attention{Q: q, K: k, V: k, Out: q, LSE: of(tensor.CUDA, 4, 6), Causal: true, CuQ: []int64{0, 1, 4},
		CuK: []int64{0, 1, 4}}
	for _, c := range []struct {
		name  string
		rates Rates
		want  float64
		call  func(d *Device, s device.Stream) error
	}{
		{"a product by its bytes", slow, 4 * (6 + 15 + 10), func(d *Device, s device.Stream) error {
			return d.Gemm(s, g)
		}},
		{"a product that adds", slow, 4 * (6 + 15 + 20), func(d *Device, s device.Stream) error {
			return d.Gemm(s, &added)
		}},
		{"a product by its arithmetic", fast, 2 * 2 * 3 * 5, func(d *Device, s device.Stream) error {
			return d.Gemm(s, g)
		}},
		{"a product by the least time", tiny, 3, func(d *Device, s device.Stream) error { return d.Gemm(s, g) }},
		{"attention of two documents", fast, 2 * 7 * 6 * 16, func(d *Device, s device.Stream) error {
			return d.AttentionForward(s, &a)
		}},
		{"attention with shifts", fast, 2 * 9 * 6 * 16, func(d *Device, s device.Stream) error {
			b := a
			b.Shift = []int64{5, 1} // of rows: the first query sees its key, the others 2 + 3 + 3 keys
			return d.AttentionForward(s, &b)
		}},
		{"its backward", fast, 5 * 7 * 6 * 16, func(d *Device, s device.Stream) error {
			return d.AttentionBackward(s, &device.AttentionGrad{Attention: a})
		}},
		{"a copy on the device", slow, 4 * 2 * 30, func(d *Device, s device.Stream) error {
			return d.Copy(s, of(tensor.CUDA, 30), of(tensor.CUDA, 30))
		}},
		{"a copy from the host", fast, 4 * 30, func(d *Device, s device.Stream) error {
			return d.Copy(s, of(tensor.CUDA, 30), of(tensor.Host, 30))
		}},
	} {
		if got := spent(c.rates, c.call); got != c.want {
			t.Errorf("%s takes %v s, want %v", c.name, got, c.want)
		}
	}
}

// Streams of an asynchronous device overlap, except for events. A device with host memory executes
// one operation after the other.
func TestStreams(t *testing.T) {
	for place, want := range map[tensor.Place]float64{tensor.CUDA: 4 + 40 + 400, tensor.Host: 4 + 40 + 400 + 80 + 12} {
		c := clock.New()
		d := open(t, place, slow, c)
		a, _ := d.NewStream()
		b, _ := d.NewStream()
		e, _ := d.NewEvent()
		c.Push("work")
		_ = d.Fill(b, of(place, 20), 0) // 80 s beside the others
		_ = d.Fill(a, of(place, 1), 0)
		c.Push("more")
		_ = d.Fill(a, of(place, 10), 0)
		_ = a.Record(e)
		_ = d.Fill(a, of(place, 3), 0) // after the event, so b does not wait for it
		_ = b.Wait(e)
		_ = d.Fill(b, of(place, 100), 0)
		c.Pop()
		c.Pop()
		if place == tensor.CUDA {
			want = max(44, 80) + 400 // b was busy for longer than the event took
		}
		x := d.Spent()
		if x.Seconds != want || x.Phases["work"] != 84 || x.Phases["more"] != 452 {
			t.Errorf("place %v: %v s, %v", place, x.Seconds, x.Phases)
		}
		twice := x.Plus(x, 2)
		if twice.Seconds != 3*want || twice.Phases["more"] != 3*452 || x.Phases["more"] != 452 {
			t.Errorf("three times that is %+v", twice)
		}
	}
}

// Communication takes the time of the links between nodes and in a node. Comparisons succeed, and
// gathered values are this rank's.
func TestMesh(t *testing.T) {
	rates := slow
	rates.Network = 0.5
	d := open(t, tensor.CUDA, rates, nil)
	l := comm.NewLedger()
	m := NewMesh(d, 5, 8, 4, 1, 0, l, nil) // two a node: sequence ranks 4 to 7, this one's neighbour is 4
	if m.Seq.Rank() != 1 || m.Seq.Size() != 4 || m.Data.Rank() != 1 || m.Data.Size() != 2 || m.World.Rank() != 5 ||
		m.Replica != 1 || m.Replicas != 2 {
		t.Errorf("mesh %+v, sequence rank %d of %d, data rank %d of %d", m, m.Seq.Rank(), m.Seq.Size(), m.Data.Rank(),
			m.Data.Size())
	}
	s, _ := d.NewStream()
	if err := m.Seq.AllToAll(s, of(tensor.CUDA, 10), of(tensor.CUDA, 14), []int64{1, 2, 3, 4},
		[]int64{5, 2, 3, 4}); err != nil {
		t.Fatal(err)
	}
	x := d.Spent()
	// the 7 rows to the other node take longest
	if x.Seconds != 4*7/0.5 || x.Node != 20 || x.Network != 28 {
		t.Errorf("all-to-all: %+v", x)
	}
	// two ranks on two nodes: each sends the tensor once over the network
	if err := m.Data.AllReduce(s, of(tensor.CUDA, 6), comm.Sum); err != nil {
		t.Fatal(err)
	}
	if y := d.Spent(); y.Seconds-x.Seconds != 24/0.5 || y.Network-x.Network != 24 || y.Node != x.Node {
		t.Errorf("all-reduce: %+v", y)
	}
	before := d.Spent()
	if err := comm.Same(m.World, "test", comm.Field{Name: "a", Value: "b"}); err != nil {
		t.Error(err)
	}
	if err := comm.Agree(m.World, nil); err != nil {
		t.Error(err)
	}
	all, err := comm.GatherBytes(m.Seq, []byte("abc"))
	if err != nil || len(all) != 4 || string(all[3]) != "abc" {
		t.Errorf("gathered %q, %v", all, err)
	}
	if y := d.Spent(); y.Node != before.Node || y.Network != before.Network {
		t.Errorf("traffic of host collectives is counted: %+v", y)
	}
	for _, e := range l.Entries() {
		if e.Op == comm.OpAllToAll && (e.Bytes != 48 || e.Axis != "sequence") {
			t.Errorf("ledger %+v", e)
		}
	}
}

func TestRatesAreNeeded(t *testing.T) {
	for _, change := range []func(*Rates){func(r *Rates) { r.Memory = 0 }, func(r *Rates) { r.Network = math.NaN() },
		func(r *Rates) { r.PerNode = 0 }} {
		r := slow
		change(&r)
		if d, err := Open(device.Info{}, noSizes{}, r, nil); err == nil {
			t.Errorf("%+v opens %v", r, d)
		}
	}
	if r := slow.Shared(4); r.Products != 0.25 || r.Memory != 0.25 || r.PerNode != 2 || slow.Shared(0.5) != slow {
		t.Errorf("shared by four: %+v", r)
	}
}
