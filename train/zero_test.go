package train

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
)

// lastBit is the distance from 1 to the next number of F32. Weights of norms are near 1.
const lastBit = 1.2e-7

// Every stage on every mesh gives the results of one rank: the weights after five steps of SGD, the
// losses of five steps of AdamW. The order of the sums in the gradient norm differs, so the results
// may not be bitwise equal.
func TestShardedTrains(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	for _, name := range []string{"llama", "qwen3"} {
		for _, optimizer := range []string{"sgd", "adamw"} {
			want := run{model: name, ranks: 1, ulysses: 1, optimizer: optimizer, compute: tensor.F32, steps: 5}.train(t)
			for _, mesh := range [][2]int{{2, 2}, {2, 1}, {4, 2}} {
				for zero := range 4 {
					x := run{model: name, ranks: mesh[0], ulysses: mesh[1], optimizer: optimizer, compute: tensor.F32,
						steps: 5, zero: zero}
					if zero == 3 && mesh[0] == 4 {
						x.on = &late
					}
					got := x.train(t)
					x.near(t, got, want, 1e-5)
					if d := furthest(got.weights, want.weights); optimizer == "sgd" && !(d <= lastBit) {
						t.Errorf("%+v: the weights differ by %.2g", x, d)
					}
					x.fits(t, got)
				}
			}
		}
	}
}

// furthest returns the largest difference.
func furthest(a, b []float32) (d float64) {
	if len(a) != len(b) {
		return 1e9
	}
	for i := range a {
		if e := float64(a[i]) - float64(b[i]); !(max(e, -e) <= d) {
			d = max(e, -e)
		}
	}
	return d
}

// fits checks that stage 3 has memory for its shards and the two largest groups only.
func (x run) fits(t *testing.T, o outcome) {
	t.Helper()
	if x.zero != 3 {
		return
	}
	cfg, err := model.ConfigFromMap(tiny[x.model])
	if err != nil {
		t.Fatal(err)
	}
	d, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	m, err := model.New(d, comm.Local(1)[0], cfg, model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var sizes []int64
	for _, g := range m.Groups() {
		sizes = append(sizes, g.Numel())
	}
	slices.Sort(sizes)
	copies := map[string]int64{"sgd": 2, "adamw": 4}[x.optimizer] // values, gradients, moments
	n := int64(len(sizes))
	limit := 4*copies*(m.Numel()/int64(x.ranks)+n) + 8*(sizes[n-1]+sizes[n-2])
	bytes := int64(0)
	for _, c := range o.table {
		for _, state := range []string{"weights", "gradients", "moments"} {
			if strings.Contains(c.Name, state) {
				bytes += c.Bytes
			}
		}
	}
	if bytes > limit || bytes < 4*copies*m.Numel()/int64(x.ranks) {
		t.Errorf("%+v: %d bytes of shards, the limit is %d: %v", x, bytes, limit, o.table)
	}
}

// In BF16, the master weights are sharded.
func TestShardedMasters(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	want := run{model: "llama", ranks: 1, ulysses: 1, optimizer: "adamw", compute: tensor.BF16, steps: 5,
		on: &late}.train(t)
	for zero := 1; zero < 4; zero++ {
		x := run{model: "llama", ranks: 2, ulysses: 2, optimizer: "adamw", compute: tensor.BF16, steps: 5, zero: zero,
			on: &late}
		x.near(t, x.train(t), want, 0)
	}
}

// logged logs the collectives of a communicator.
type logged struct {
	comm.Comm
	log *[]string
}

func (g logged) AllGather(s device.Stream, dst, src tensor.Tensor, counts []int64) error {
	*g.log = append(*g.log, fmt.Sprintf("gather %d", dst.Numel()))
	return g.Comm.AllGather(s, dst, src, counts)
}

func (g logged) ReduceScatter(s device.Stream, dst, src tensor.Tensor, counts []int64) error {
	*g.log = append(*g.log, fmt.Sprintf("reduce %d", src.Numel()))
	return g.Comm.ReduceScatter(s, dst, src, counts)
}

// The weights of a group are gathered before the previous group computes. Its gradients are reduced
// before the next use begins. A group that is in a slot is not gathered again.
func TestShardedOrder(t *testing.T) {
	groups := make([]*model.Group, 4)
	for i := range groups { // the log identifies groups by their size
		groups[i] = &model.Group{Name: fmt.Sprint(i),
			Params: []*model.Param{{Name: fmt.Sprint(i), Shape: []int64{int64(20 - i)}}}}
	}
	const reads, both = model.Reads, model.Reads | model.Adds
	order := []model.Use{{Group: 0, Access: reads}, {Group: 1, Access: reads}, {Group: 2, Access: reads},
		{Group: 3, Access: both}, {Group: 2, Access: both},
		{Group: 1, Access: both}, {Group: 0, Access: model.Adds}}
	want := strings.Split(
		"gather 20, gather 19, use 0, release 0, gather 18, use 1, release 1, gather 17, use 2, release 2, use 3, reduce 17, release 3, gather 19, "+
			"use 2, reduce 18, release 2, use 1, reduce 19, release 1, use 0, reduce 20, release 0", ", ")
	log := []string{}
	err := comm.RunLocal(2, func(c comm.Comm) error {
		d, err := cpu.New(cpu.Options{Workers: 1})
		if err != nil {
			return err
		}
		defer d.Close()
		mine := []string{}
		own := make([]*model.Group, len(groups))
		for i, g := range groups {
			own[i] = &model.Group{Name: g.Name, Params: []*model.Param{{Name: g.Name, Shape: g.Params[0].Shape}}}
		}
		w, err := NewZeRO(d, logged{c, &mine}, own, tensor.F32, &OptimizerConfig{Name: "sgd"}, 3, Offload{})
		if err != nil {
			return err
		}
		defer w.Free()
		s, err := d.NewStream()
		if err != nil {
			return err
		}
		defer s.Close()
		if err := w.Begin(s, 1); err != nil {
			return err
		}
		if err := w.Pass(order); err != nil {
			return err
		}
		for _, x := range order {
			if err := w.Gather(x.Group, s); err != nil {
				return err
			}
			mine = append(mine, fmt.Sprintf("use %d", x.Group))
			if p := own[x.Group].Params[0]; x.Access&model.Reads != 0 && p.Value.IsNil() || x.Access&model.Adds != 0 &&
				p.Grad.IsNil() {
				return fmt.Errorf("group %d has no values after Gather", x.Group)
			}
			if err := w.Release(x.Group, s); err != nil {
				return err
			}
			mine = append(mine, fmt.Sprintf("release %d", x.Group))
		}
		if err := w.Gather(0, s); err == nil {
			return fmt.Errorf("a group out of order was gathered")
		}
		if c.Rank() == 0 {
			log = mine
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(log, want) {
		t.Errorf("order\n%s\nwant\n%s", strings.Join(log, ", "), strings.Join(want, ", "))
	}
}
