package train

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
	"ulysses/testkit/near"
)

// reductions logs the reductions of gradients.
type reductions struct {
	comm.Comm
	log *[]string
}

func (c reductions) AllReduce(s device.Stream, t tensor.Tensor, op comm.Op) error {
	if s != nil { // else it is a sum of norms
		*c.log = append(*c.log, fmt.Sprintf("reduce %d", t.Numel()))
	}
	return c.Comm.AllReduce(s, t, op)
}

func (c reductions) ReduceScatter(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	*c.log = append(*c.log, fmt.Sprintf("reduce %d", src.Numel()))
	return c.Comm.ReduceScatter(s, dst, src, rows)
}

// rankOfSums is a rank of TestReductionsOverlapBackward. Its weights are rank+1.
type rankOfSums struct {
	d      device.Device
	s      device.Stream
	w      Weights
	groups []*model.Group
	log    []string // uses and reductions, in the order of the calls
}

// pass runs a pass. Each use that adds to a gradient adds the weights of the rank.
func (r *rankOfSums) pass(order []model.Use) error {
	if err := r.w.Pass(order); err != nil {
		return err
	}
	for _, u := range order {
		p := r.groups[u.Group].Params[0]
		if err := r.w.Gather(u.Group, r.s); err != nil {
			return err
		}
		if u.Access&model.Adds != 0 {
			if err := r.d.Add(r.s, p.Grad, p.Grad, p.Value); err != nil {
				return err
			}
		}
		r.log = append(r.log, fmt.Sprintf("use %d", u.Group))
		if err := r.w.Release(u.Group, r.s); err != nil {
			return err
		}
	}
	for _, g := range r.groups {
		if err := r.w.GradReady(g.Params[0], r.s); err != nil {
			return err
		}
	}
	return nil
}

// step runs a step of two passes, and returns the norm of the sums. An abandoned step ends before
// Reduce, as a step whose first NaN was found in a pass.
func (r *rankOfSums) step(order []model.Use, abandoned bool) (norm float64, err error) {
	if err := r.w.Begin(r.s, 2); err != nil {
		return 0, err
	}
	for range 2 {
		if err := r.pass(order); err != nil {
			return 0, err
		}
	}
	if abandoned {
		return 0, nil
	}
	return r.w.Reduce(r.s)
}

// In the last pass of a step, the sum of a group's gradients begins when its last use has ended,
// before the next use begins, on a stream of its own. A table that the embedding and the head share
// is summed once, after the embedding. A group without a use is left to Reduce, and on the CPU all
// groups are. The sums are right although streams run in random order, also after a step that ended
// without Reduce.
func TestReductionsOverlapBackward(t *testing.T) {
	const reads, both = model.Reads, model.Reads | model.Adds
	sizes := []int64{20, 19, 18, 17, 7} // the log identifies groups by their size
	order := []model.Use{{Group: 0, Access: reads}, {Group: 1, Access: reads}, {Group: 2, Access: reads},
		{Group: 0, Access: both}, {Group: 3, Access: both},
		{Group: 2, Access: both}, {Group: 1, Access: reads}, {Group: 1, Access: both}, {Group: 0, Access: model.Adds}}
	uses := "use 0, use 1, use 2, use 0, use 3, use 2, use 1, use 1, use 0"
	overlapped := uses +
		", use 0, use 1, use 2, use 0, use 3, reduce 17, use 2, reduce 18, use 1, use 1, reduce 19, use 0, reduce 20"
	// each pass adds 1 on rank 0 and 2 on rank 1, twice to the table
	norm := math.Sqrt(12*12*20 + 6*6*(19+18+17))
	late, plugin := devicetest.Fake("late", fake.Options{}), devicetest.CUDA(t, "cuda", false)
	for _, c := range []struct {
		on    devicetest.Kind
		stage int
		want  string
	}{
		{late, 0, overlapped + ", reduce 7"}, {late, 1, overlapped + ", reduce 7"},
		{plugin, 0, overlapped + ", reduce 7"}, {plugin, 1, overlapped + ", reduce 7"},
		{devicetest.CPU(), 0, uses + ", " + uses + ", reduce 81"},
		{devicetest.CPU(), 1, uses + ", " + uses + ", reduce 20, reduce 19, reduce 18, reduce 17, reduce 7"},
	} {
		err := comm.RunLocal(2, func(host comm.Comm) error {
			d, k, done, err := c.on.Open(host)
			if err != nil {
				return err
			}
			defer d.Close()
			r := rankOfSums{d: d}
			for _, n := range sizes {
				r.groups = append(r.groups, &model.Group{Params: []*model.Param{{Shape: []int64{n}}}})
			}
			ledger := comm.NewLedger()
			counted := comm.NewCounted(reductions{k, &r.log}, "world", ledger, nil, nil)
			if r.w, err = NewWeights(d, &comm.Mesh{World: counted}, r.groups, tensor.F32, &OptimizerConfig{Name: "sgd"},
				c.stage, Offload{}); err != nil {
				return err
			}
			defer r.w.Free()
			if r.s, err = d.NewStream(); err != nil {
				return err
			}
			defer r.s.Close()
			for _, g := range r.groups {
				if err := d.Fill(r.s, g.Params[0].Value, float64(host.Rank()+1)); err != nil {
					return err
				}
			}
			if _, err := r.step(order, true); err != nil {
				return err
			}
			r.log = nil
			got, err := r.step(order, false)
			if err != nil {
				return err
			}
			near.Value(t, fmt.Sprintf("%s, stage %d: norm", c.on.Name, c.stage), got, norm, 1e-12)
			if want := strings.Split(c.want, ", "); !slices.Equal(r.log, want) {
				t.Errorf("%s, stage %d:\n%s\nwant\n%s", c.on.Name, c.stage, strings.Join(r.log, ", "), c.want)
			}
			if err := checkTraffic(ledger, r.w.Traffic()); err != nil {
				t.Errorf("%s, stage %d: %v", c.on.Name, c.stage, err)
			}
			return done()
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Sums that overlap backward give bitwise the weights, losses and norms of sums after backward:
// with several micro-batches, with a table that embedding and head share, on replicas and within a
// sequence.
func TestOverlapIsBitwiseEqual(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{HeadMajor: true})
	for _, x := range []run{
		{model: "qwen3", ranks: 2, ulysses: 1, optimizer: "adamw"},
		{model: "qwen3", ranks: 2, ulysses: 2, optimizer: "sgd"},
		{model: "llama", ranks: 4, ulysses: 2, optimizer: "adamw"},
		{model: "llama", ranks: 4, ulysses: 2, optimizer: "sgd"},
	} {
		for x.zero = range 2 {
			x.compute, x.steps, x.on = tensor.F32, 3, nil
			after := x.train(t)
			x.on = &late
			overlapped := x.train(t)
			if !slices.Equal(after.weights, overlapped.weights) || !slices.Equal(after.losses, overlapped.losses) ||
				!slices.Equal(after.norms, overlapped.norms) {
				t.Errorf("%+v: losses %v, norms %v, and overlapped %v, %v", x, after.losses, after.norms,
					overlapped.losses, overlapped.norms)
			}
		}
	}
}
