package train

import (
	"cmp"
	"math"
	"slices"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/model"
	"ulysses/tensor"
)

// Choice is a way to run the passes of a step, with the memory and the time that it needs.
type Choice struct {
	model.Activations
	Tiles        model.Tiles
	Waits        bool    // steps wait for checkpoints, which are written without a copy to save memory
	Device, Host int64   // planned bytes, of the rank that needs most
	Extra        float64 // expected time beyond a step that keeps everything, as a fraction of it
	Chosen       bool

	fits bool // on every rank
}

// planner chooses the policies of saved activations, whether the MLP runs in tiles, and whether
// there is a copy of the training state for checkpoints.
type planner struct {
	*Setup
	freeHost    int64             // the minimum of Memory.FreeHost over the ranks
	saver       *saver            // nil = no checkpoints
	activations []model.Component // of the choice to which the model is set
	considered  []Choice
	work        float64 // FLOP of the model for a step's tokens
}

// components lists the planned memory of this rank.
func (p *planner) components() []model.Component {
	all := append(p.Weights.Components(), p.activations...)
	all = append(all, model.Component{Name: "tokens", Bytes: p.inputBytes()})
	return append(append(all, p.saver.component()...), p.Extra...)
}

// run chooses, among the choices that fit on all ranks, the one that takes the least time. It sets
// the model to that choice. Collective.
func (p *planner) run() error {
	free := []int64{-p.Memory.FreeHost} // all ranks must have the same choices
	if err := p.Mesh.World.AllReduce(nil, tensor.OfInt64(free, 1), comm.Max); err != nil {
		return err
	}
	p.freeHost = -free[0]
	tokens, _ := p.MaxTokens()
	p.work = p.Model.Flops(tokens, p.Model.Config.Pairs(tokens))
	if p.Data.Train == nil {
		for _, tiles := range p.tiles() {
			p.considered = append(p.considered, Choice{Tiles: tiles})
		}
	} else {
		p.considered = p.choices()
	}
	if len(p.considered) == 0 {
		return status.Errorf(status.InvalidConfig,
			"memory.qkv: memory.attention = %q needs qkv = \"recompute\"; set memory.qkv = \"auto\"",
			p.Memory.Config.Attention)
	}
	best, err := p.choose()
	if err != nil {
		return err
	}
	p.considered[best].Chosen = true
	_, err = p.size(&p.considered[best])
	return err
}

// choose returns the index of the best choice. It tries the first choice alone, which nearly always
// fits, and then all of them, with savings only where that is faster than what fits otherwise.
// If none fits, it returns the choice that needs the least memory. The error says that the choice
// exceeds a hard limit.
func (p *planner) choose() (int, error) {
	if err := p.try(p.considered[:1]); err != nil {
		return 0, err
	}
	savings := p.savings()
	if p.considered[0].fits || len(p.considered) == 1 && len(savings) == 0 {
		p.considered = p.considered[:1]
		return 0, p.refuse(&p.considered[0])
	}
	if err := p.try(p.considered); err != nil {
		return 0, err
	}
	tried := slices.Clone(p.considered)
	best := fastest(tried)
	for _, v := range savings {
		var faster []Choice
		for _, x := range p.considered {
			if best < 0 || x.Extra < tried[best].Extra {
				if v.panel > 0 {
					x.Tiles.GDN = v.panel
				}
				x.Waits = v.waits
				faster = append(faster, x)
			}
		}
		if len(faster) == 0 {
			break
		}
		if err := p.try(faster); err != nil {
			return 0, err
		}
		tried = append(tried, faster...)
		best = fastest(tried)
	}
	fits := best >= 0
	for i := range tried {
		if best < 0 || !fits && tried[i].Device < tried[best].Device {
			best = i
		}
	}
	if best >= len(p.considered) { // of the choices with savings, only this one is listed
		p.considered = append(p.considered, tried[best])
		best = len(p.considered) - 1
	}
	return best, p.refuse(&p.considered[best])
}

// fastest returns the index of the choice that takes the least time of those that fit, the first of
// several; -1 = none fits.
func fastest(all []Choice) int {
	best := -1
	for i := range all {
		if all[i].fits && (best < 0 || all[i].Extra < all[best].Extra) {
			best = i
		}
	}
	return best
}

// saving is a change to a choice that saves memory and costs little time.
type saving struct {
	panel int64 // Tiles.GDN; 0 = unchanged
	waits bool  // Choice.Waits
}

// savings returns the savings that the job leaves to the planner, the faster first.
func (p *planner) savings() (all []saving) {
	panels := p.panels()
	for _, n := range panels {
		all = append(all, saving{panel: n})
	}
	if p.saver.mayWait() {
		all = append(all, saving{waits: true})
		for _, n := range panels {
			all = append(all, saving{n, true})
		}
	}
	return all
}

// panels returns short panels (Tiles.GDN), the faster first, if the job leaves them to the planner.
// Their memory is a few hundred MiB. They cost launches and idle multiprocessors, far less than the
// recomputation that they may save.
func (p *planner) panels() (all []int64) {
	if p.Model.Tiles().GDN == model.TileAuto && p.Model.Linear() != nil && p.Device.Info().Place != tensor.Host {
		tokens, _ := p.MaxTokens()
		for _, n := range []int64{16384, 4096} {
			if n < tokens {
				all = append(all, n)
			}
		}
	}
	return all
}

// try sets the memory and the time of choices, and whether each fits on all ranks. Collective.
func (p *planner) try(some []Choice) error {
	l, n := p.limits(), int64(len(some))
	// Of each choice: bytes of the device, bytes of the host, 1 = it does not fit, and the bits of
	// its time, in the order of the times. Ranks with other memory or threads must choose alike.
	most := make([]int64, 4*n)
	var err error
	for i := range some {
		var size [2]int64
		if size, err = p.size(&some[i]); err != nil {
			break
		}
		x := most[4*i:]
		x[0], x[1], x[3] = size[0], size[1], int64(math.Float64bits(p.extra(&some[i])))
		if size[0] > l.device || size[1] > l.host || size[0]+size[1] > l.sum {
			x[2] = 1
		}
	}
	if err = comm.Agree(p.Mesh.World, err); err != nil {
		return err
	}
	if err := p.Mesh.World.AllReduce(nil, tensor.OfInt64(most, 4*n), comm.Max); err != nil {
		return err
	}
	for i := range some {
		x := most[4*i:]
		some[i].Device, some[i].Host, some[i].fits, some[i].Extra = x[0], x[1], x[2] == 0,
			math.Float64frombits(uint64(x[3]))
	}
	return nil
}

// size sets the model to a choice and returns the bytes that this rank plans for it, of the device
// and of the host.
func (p *planner) size(x *Choice) (bytes [2]int64, err error) {
	if err = p.Model.SetTiles(x.Tiles); err == nil {
		err = p.Model.SetActivations(x.Activations)
	}
	if status.Of(err) == status.InvalidArgument {
		err = status.Errorf(status.InvalidConfig, "[memory] and [tile]: the settings are impossible: %w", err)
	}
	if err != nil {
		return bytes, err
	}
	tokens, shard := p.MaxTokens()
	if p.activations, err = p.Model.Memory(shard, tokens, p.Data.Train != nil); err != nil {
		return bytes, err
	}
	p.saver.setWaits(x.Waits)
	all := p.components()
	return [2]int64{model.Bytes(all), model.HostBytes(all)}, nil
}

// refuse returns an error for a choice that exceeds a limit of [memory] or the device's memory. It
// sets the model to the choice.
func (p *planner) refuse(x *Choice) error {
	if _, err := p.size(x); err != nil {
		return err
	}
	all, limit := p.components(), &p.Memory.Config
	if limit.Device > 0 {
		if err := within(all, false, units.FromGiB(limit.Device), "memory.device allows",
			fixOf(p.Device, p.Memory.Stage, all)); err != nil {
			return err
		}
	}
	if limit.Host > 0 {
		if err := within(all, true, units.FromGiB(limit.Host), "memory.host allows",
			orZero(p.Memory.Stage, hostFix)); err != nil {
			return err
		}
	}
	if err := fitsHost(p.Device, p.freeHost, p.Memory.PerNode, p.Memory.Stage, all); err != nil {
		return err
	}
	return fits(p.Device, p.Memory.Stage, all)
}

// limits are the bytes that a rank may plan; math.MaxInt64 = unknown. sum is the limit of both
// together, for a device that computes in host memory.
type limits struct{ device, host, sum int64 }

// limits returns the limits of [memory]. Without them it returns nine tenths of the memory of a
// device that has its own, or of the part that was free, or of the host's memory that this rank may
// use. The last tenth is for what is allocated outside of the plan: streams and the libraries'
// kernels.
func (p *planner) limits() limits {
	most := func(n int64) int64 { return n - n/10 }
	l := limits{math.MaxInt64, math.MaxInt64, math.MaxInt64}
	if p.Device.Info().Place == tensor.Host && p.freeHost > 0 {
		l.sum = p.freeHost
	}
	own := p.Device.Info().Usable()
	switch {
	case p.Memory.Config.Device > 0:
		l.device = units.FromGiB(p.Memory.Config.Device)
	case own > 0:
		l.device = most(own)
	case p.freeHost > 0:
		l.device = most(p.freeHost)
	}
	switch {
	case p.Memory.Config.Host > 0:
		l.host = units.FromGiB(p.Memory.Config.Host)
	case p.Device.Info().Place != tensor.Host && p.freeHost > 0:
		l.host = most(p.freeHost)
	}
	return l
}

// choices returns the choices that [memory] and [tile] allow, the simplest first. It includes
// offloading if a key sets it, if the device has memory of its own, or if memory.host sets a limit.
func (p *planner) choices() (all []Choice) {
	w, layers := p.Memory.Config, p.Model.Config.NumHiddenLayers
	offload := w.Host > 0 || p.freeHost > 0 && p.Device.Info().Place != tensor.Host
	policies := func(s string) []model.Policy {
		policy, ok := map[string]model.Policy{"keep": model.Keep, "recompute": model.Recompute,
			"offload": model.Offload}[s]
		switch {
		case ok:
			return []model.Policy{policy}
		case offload:
			return []model.Policy{model.Keep, model.Recompute, model.Offload}
		}
		return []model.Policy{model.Keep, model.Recompute}
	}
	inputs := p.blockInputs(w, layers, policies(w.BlockInput))
	for _, x := range p.tiles() {
		for _, in := range inputs {
			for _, attention := range policies(w.Attention) {
				for _, qkv := range policies(w.QKV) {
					for _, mlp := range policies(w.MLP) {
						for _, groups := range p.headGroups() {
							a := model.Activations{BlockInput: in.policy, Segment: in.segment, Attention: attention,
								QKV: qkv, MLP: mlp, HeadGroups: groups}
							if sensible(&a, &w) {
								all = append(all, Choice{Activations: a, Tiles: x})
							}
						}
					}
				}
			}
		}
	}
	return all
}

// tiles returns the tiles that may be tried: the job's, and with an MLP in tiles if the job leaves
// this open.
func (p *planner) tiles() []model.Tiles {
	all := []model.Tiles{p.Model.Tiles()}
	if x := all[0]; x.MLP == model.TileAuto {
		x.MLP = p.Model.MLPTile()
		all = append(all, x)
	}
	return all
}

// blockInput is a policy for the inputs of blocks; only every segment-th input is kept or
// offloaded.
type blockInput struct {
	policy  model.Policy
	segment int64
}

// blockInputs returns the choices for the inputs of the layers.
func (p *planner) blockInputs(w MemoryConfig, layers int64, policies []model.Policy) (all []blockInput) {
	segments := []int64{w.Segment}
	if w.Segment == 0 {
		segments = []int64{1}
		for _, k := range []int64{2, 3, 4, int64(math.Ceil(math.Sqrt(float64(layers)))), layers} {
			if k <= layers && k > segments[len(segments)-1] {
				segments = append(segments, k)
			}
		}
	}
	for _, policy := range policies {
		for _, k := range segments {
			switch {
			case policy == model.Keep && (k == 1 || isAuto(w.BlockInput) && w.Segment > 0), policy == model.Offload:
				all = append(all, blockInput{policy, k})
			case policy == model.Recompute && (k > 1 || layers == 1):
				all = append(all, blockInput{model.Keep, k})
			}
		}
	}
	return all
}

// headGroups returns the numbers of head groups for which every rank has a head of each group.
func (p *planner) headGroups() []int64 {
	c := p.Model.Config
	if p.Memory.Config.HeadGroups > 0 {
		return []int64{p.Memory.Config.HeadGroups}
	}
	groups := []int64{1}
	for g := int64(2); g <= min(8, c.NumKeyValueHeads); g *= 2 {
		if c.NumKeyValueHeads%g == 0 && c.NumAttentionHeads/g >= int64(p.Mesh.Seq.Size()) {
			groups = append(groups, g)
		}
	}
	return groups
}

// isAuto reports whether the planner chooses the value of a key.
func isAuto(word string) bool { return word == "" || word == "auto" }

// sensible returns false for choices that are impossible, and for choices that no key sets and that
// need much memory to save little recomputation.
func sensible(a *model.Activations, w *MemoryConfig) bool {
	if a.Attention == model.Recompute && a.QKV != model.Recompute {
		return false
	}
	if a.Segment > 1 && isAuto(w.QKV) && isAuto(w.MLP) && (a.QKV != model.Recompute || a.MLP != model.Recompute) {
		return false
	}
	return a.HeadGroups <= 1 || w.HeadGroups > 0 || a.QKV == model.Recompute
}

// These rates weigh recomputation against copies, in FLOP/s and bytes/s of a rank. They are typical
// of an H100 on PCIe 5, where copies and computation overlap, and of a core with AVX2, where they
// do not. They only rank choices; `plan` estimates times from measured rates.
const (
	gpuFlops, gpuCopies   = 400e12, 50e9
	coreFlops, coreCopies = 50e9, 8e9
	// bytes/s that a node writes to a file system
	nodeWrites = 1e9
)

// copied returns the bytes that a pass copies between the device and the host: offloaded
// activations to the host and back, and gradients that are summed on the host. Other bytes on the
// host, of the optimizer's states and of a copy for checkpoints, are not copied in a pass.
func (p *planner) copied() int64 {
	n := 2 * model.HostBytes(p.activations)
	for _, c := range p.Weights.Components() {
		if c.Host && isOf(c, gradientShard) {
			n += c.Bytes * min(2, max(1, p.Data.Config.Accumulate)) // the first micro-batch adds to nothing
		}
	}
	return n
}

// extra returns the expected extra time of the choice to which the model is set, as a fraction of
// the step: recomputation, the time of copies that does not overlap with computation, and the wait
// for checkpoints.
func (p *planner) extra(x *Choice) float64 {
	tokens, _ := p.MaxTokens()
	pairs := p.Model.Config.Pairs(tokens)
	again := p.Model.RecomputeFlops(tokens, pairs) / p.work
	flops, onHost := gpuFlops, p.Device.Info().Place == tensor.Host
	if onHost {
		flops = coreFlops * float64(max(1, p.Device.Info().Workers))
	}
	pass := p.work / float64(p.Mesh.Seq.Size()) / flops // seconds of a micro-batch
	if x.Waits {
		wait := float64(p.saver.copyBytes()) * float64(max(1, p.Memory.PerNode)) / nodeWrites
		again += wait / float64(p.saver.interval()) / float64(max(1, p.Data.Config.Accumulate)) / pass
	}
	if onHost {
		return again + float64(p.copied())/coreCopies/pass
	}
	return again + max(0, float64(p.copied())/gpuCopies/pass-1)
}

// listed returns the chosen choice and the considered choices for which no other needs at most as
// much memory of both kinds and at most as much time, ordered by time.
func (p *planner) listed() []Choice {
	var all []Choice
	for i, x := range p.considered {
		worse := slices.ContainsFunc(p.considered, func(y Choice) bool {
			return y.Device <= x.Device && y.Host <= x.Host && y.Extra <= x.Extra &&
				(y.Device < x.Device || y.Host < x.Host || y.Extra < x.Extra)
		})
		twin := slices.ContainsFunc(p.considered[:i], func(y Choice) bool {
			return y.Device == x.Device && y.Host == x.Host && y.Extra == x.Extra && !x.Chosen
		})
		if x.Chosen || !worse && !twin {
			all = append(all, x)
		}
	}
	slices.SortStableFunc(all, func(x, y Choice) int { return cmp.Compare(x.Extra, y.Extra) })
	return all
}
