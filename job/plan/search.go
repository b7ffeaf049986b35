package plan

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"text/tabwriter"

	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/file"
	"ulysses/model"
)

// sharding says how the weights of a candidate are divided among ranks.
type sharding struct {
	zero    int64 // ZeRO stage
	experts int64 // ranks among which experts are divided; 0 = they are not
}

// candidate is a mesh that search plans with each sharding.
type candidate struct {
	mesh      file.Mesh // without World and GlobalBatch
	shardings []sharding
	// the plan with the sharding of the most tokens a second; if none fits, with the last one
	sharding
	memory        int64   // bytes of a rank
	seconds, rate float64 // of a step; tokens a second
	longest       int64   // tokens of the longest sequence that fits; 0 = none
	why           error   // the reason why the job does not fit or is not possible

	// ranks of a sequence that may have the most work with the first sharding; with another one, or
	// with other lengths, shards of weights and tokens differ by few elements
	heaviest []int
	estimate float64 // seconds for the tokens of a step, comparable between candidates
	parse    func(sets ...string) (*file.Job, error)
	ranks    int
}

// tooSlow is the estimate, relative to the least one of a mesh that fits, above which search leaves
// a mesh out. It is far above the error of estimates.
const tooSlow = 3

// search plans the meshes of the ranks, with both forms of a ring, and with the fastest of the ZeRO
// stages; in models with experts also with experts divided among as many ranks as possible. A ring,
// a stage or a division that the job sets is kept. It prints the meshes, the fastest first, and
// how many it has left out because their estimates are too slow.
func search(w io.Writer, parse func(sets ...string) (*file.Job, error), ranks int, m *Machine, x *subject) error {
	given, err := parse()
	if err != nil {
		return err
	}
	stages := []int64{0, 1, 2, 3}
	switch {
	case given.IsSet("parallel.zero"):
		stages = []int64{given.Parallel.Zero}
	case ranks == 1:
		stages = stages[:1]
	case given.Kind == "eval": // only weights can be sharded
		stages = []int64{0, 3}
	}
	var shardings []sharding
	for _, experts := range divisions(given, int64(ranks), x) {
		for _, zero := range stages {
			shardings = append(shardings, sharding{zero, experts})
		}
	}
	var all []candidate
	for _, mesh := range meshes(given, int64(ranks), m, x) {
		c := candidate{mesh: mesh, shardings: shardings, parse: parse, ranks: ranks,
			estimate: estimate(given, &mesh, m, x)}
		if given.Kind == "eval" { // the estimate is of a pass, in which each replica has its own sequences
			c.estimate /= float64(mesh.Replicas)
		}
		all = append(all, c)
	}
	if len(all) == 0 {
		given.Parallel.Ulysses = 0  // the meshes have any
		return given.Resolve(ranks) // the ring does not divide the ranks
	}
	planned, err := planNear(all, m, x)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(planned, func(c candidate) bool { return status.Of(c.why) != status.InvalidConfig }) {
		return planned[0].why // the job is not possible on any mesh
	}
	slices.SortStableFunc(planned, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(b.rate, a.rate), cmp.Compare(b.longest, a.longest))
	})
	if err := printCandidates(w, planned, m, x.config != nil && x.config.SparseLayers() > 0); err != nil ||
		len(planned) == len(all) {
		return err
	}
	_, err = fmt.Fprintf(w,
		"\n%d of %d meshes are left out: by the formula, they take more than %d times as long as the fastest mesh that fits\n",
		len(all)-len(planned), len(all), tooSlow)
	return err
}

// divisions returns the numbers of ranks among which search divides experts: the number of the job,
// or 0 and the largest one that is possible.
func divisions(j *file.Job, ranks int64, x *subject) []int64 {
	if j.IsSet("parallel.experts") || x.config == nil || x.config.SparseLayers() == 0 {
		return []int64{j.Parallel.Experts}
	}
	most := min(ranks, x.config.Experts.Count)
	for ranks%most > 0 {
		most--
	}
	if most == 1 {
		return []int64{0}
	}
	return []int64{0, most}
}

// planNear plans the candidates in the order of their estimates, and leaves out those that are too
// slow. They are planned in groups of fixed size, so the result does not depend on the number of
// cores.
func planNear(all []candidate, m *Machine, x *subject) (planned []candidate, err error) {
	slices.SortStableFunc(all, func(a, b candidate) int { return cmp.Compare(a.estimate, b.estimate) })
	const group = 8
	best := math.Inf(1) // least estimate of a candidate that fits
	for at := 0; at < len(all); at = len(planned) {
		next := all[at:min(at+group, len(all))]
		if n := slices.IndexFunc(next, func(c candidate) bool { return c.estimate > tooSlow*best }); n >= 0 {
			next = next[:n]
		}
		if len(next) == 0 {
			break
		}
		if err := planAll(next, m, x); err != nil {
			return nil, err
		}
		for i := range next {
			if next[i].rate > 0 {
				best = min(best, next[i].estimate)
			}
		}
		planned = all[:at+len(next)]
	}
	return planned, nil
}

// lockedSizes serialises calls of a device's sizes, because a device serves one caller at a time.
type lockedSizes struct {
	mu    sync.Mutex
	sizes dryrun.Sizes
}

func (s *lockedSizes) AttentionWorkspace(a *device.Attention, backward bool) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sizes.AttentionWorkspace(a, backward)
}

func (s *lockedSizes) GatedDeltaSizes(a *device.GatedDelta) device.DeltaSizes {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sizes.GatedDeltaSizes(a)
}

// planAll plans the candidates in parallel on all cores. They share only the device.
func planAll(all []candidate, m *Machine, x *subject) error {
	shared := *m
	shared.Sizes = &lockedSizes{sizes: m.Sizes}
	errs, next := make([]error, len(all)), make(chan int)
	var group sync.WaitGroup
	for range min(len(all), runtime.GOMAXPROCS(0)) {
		group.Go(func() {
			for i := range next {
				errs[i] = all[i].plan(&shared, x)
			}
		})
	}
	for i := range all {
		next <- i
	}
	close(next)
	group.Wait()
	return cmp.Or(errs...)
}

// job returns the job on this mesh with a sharding.
func (c *candidate) job(by sharding, sets ...string) (*file.Job, error) {
	form := map[bool]string{false: "off", true: "on"}[c.mesh.Gather]
	sets = append(sets, fmt.Sprintf("parallel.ulysses=%d", c.mesh.Ulysses),
		fmt.Sprintf("parallel.ring=%d", c.mesh.Ring), "parallel.gather="+form, fmt.Sprintf("parallel.zero=%d", by.zero))
	if by.experts > 0 {
		sets = append(sets, fmt.Sprintf("parallel.experts=%d", by.experts))
	}
	j, err := c.parse(sets...)
	if err == nil {
		err = j.Resolve(c.ranks)
	}
	return j, err
}

// plan predicts the job with each sharding, and the longest sequence that fits with the best one.
func (c *candidate) plan(m *Machine, x *subject) (err error) {
	defer func() {
		if p := recover(); p != nil { // the caller of search cannot recover it
			err = panicked(p)
		}
	}()
	possible := false // with any sharding
	for _, by := range c.shardings {
		f, err := c.predict(by, m, x)
		if c.rate == 0 {
			c.sharding = by
		}
		switch code := status.Of(err); {
		case err == nil:
			if rate := float64(f.tokens) / f.Seconds; rate > c.rate {
				c.sharding, c.memory, c.seconds, c.rate = by, model.Bytes(f.Memory), f.Seconds, rate
			}
			f.Close()
			possible = true
		case code == status.OutOfMemory:
			possible, c.why = true, err
		case code == status.InvalidConfig:
			c.why = err
		default:
			return err
		}
	}
	if c.rate > 0 {
		c.why = nil
	}
	if !possible {
		return nil
	}
	c.longest, err = longest(func(tokens int64) (bool, error) {
		j, err := c.job(c.sharding, "data.sequence="+strconv.FormatInt(tokens, 10))
		if err != nil {
			return false, err
		}
		f, err := predictRanks(j, m, x, c.heaviest, false)
		if err == nil {
			f.Close()
		}
		if status.Of(err) == status.OutOfMemory {
			return false, nil
		}
		return err == nil, err
	})
	return err
}

// predict dry-runs the job on this mesh.
func (c *candidate) predict(by sharding, m *Machine, x *subject) (*Forecast, error) {
	j, err := c.job(by)
	if err == nil && c.heaviest == nil {
		c.heaviest, err = heaviest(j, m, x)
	}
	if err != nil {
		return nil, err
	}
	return predictRanks(j, m, x, c.heaviest, true)
}

// longest returns the largest number of tokens that fits, with an error of at most 1 %; 0 if none
// fits.
func longest(fits func(tokens int64) (bool, error)) (int64, error) {
	const first, most = 1024, math.MaxInt32
	lo, hi := int64(0), int64(first)
	for {
		ok, err := fits(hi)
		if err != nil {
			return 0, err
		}
		if !ok {
			break
		}
		if lo = hi; lo == most {
			return lo, nil
		}
		hi = min(4*hi, most)
	}
	for step := max(int64(1), lo/100); lo > 0 && hi-lo > step; {
		mid := lo + (hi-lo)/2
		if mid > first {
			mid -= mid % first
		}
		if mid <= lo {
			break
		}
		ok, err := fits(mid)
		if err != nil {
			return 0, err
		}
		if ok {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo, nil
}

// printCandidates prints the table. With experts, it has a column for their division.
func printCandidates(out io.Writer, all []candidate, m *Machine, experts bool) error {
	fmt.Fprintf(out, "%s, %d a node: %s\n\n", units.Count(int64(all[0].ranks), "rank"), m.Rates.PerNode, m.text)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	head := ""
	if experts {
		head = "\texperts"
	}
	fmt.Fprintln(w, "ulysses\tring\tkeys\tdata\tzero"+head+"\tmemory of a rank\texpected s\ttokens/s\tlongest sequence\t")
	for _, c := range all {
		memory, seconds, rate := "does not fit", "", ""
		if c.why == nil {
			memory, seconds, rate = units.Bytes(c.memory), fmt.Sprintf("%.4g", c.seconds),
				units.Short(c.rate)
		} else if status.Of(c.why) == status.InvalidConfig {
			memory = "not possible"
		}
		keys := "" // how a ring sends them
		switch {
		case c.mesh.Gather:
			keys = "at once"
		case c.mesh.Ring > 1:
			keys = "in steps"
		}
		divided := ""
		if experts {
			divided = fmt.Sprintf("\t%d", max(1, c.experts))
		}
		fmt.Fprintf(w, "%d\t%d\t%s\t%d\t%d%s\t%s\t%s\t%s\t%d\t\n", c.mesh.Ulysses, c.mesh.Ring, keys, c.mesh.Replicas,
			c.zero, divided, memory, seconds, rate, c.longest)
	}
	return w.Flush()
}
