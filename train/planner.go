package train

import (
	"cmp"
	"math"
	"slices"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// Choice is a way to run a step's passes, and what it takes.
type Choice struct {
	model.Activations
	Tiles        model.Tiles
	Device, Host int64   // bytes planned in all, of the rank that needs most
	Extra        float64 // expected time on top of a step that keeps everything, as a share of it
	Taken        bool

	fits bool // on every rank
}

// limits are the bytes that a rank may plan, math.MaxInt64 where nobody says.
type limits struct{ device, host int64 }

const gib = 1 << 30

// limits are [memory]'s; where it leaves them open, nine tenths of a device with memory of its own,
// or of what this rank may take of the host.
func (t *Trainer) limits() limits {
	part := func(n int64) int64 { return n - n/10 }
	l := limits{math.MaxInt64, math.MaxInt64}
	own := t.Device.Info().Memory
	switch {
	case t.Memory.Device > 0:
		l.device = int64(t.Memory.Device * gib)
	case own > 0:
		l.device = part(own)
	case t.FreeHost > 0:
		l.device = part(t.FreeHost)
	}
	switch {
	case t.Memory.Host > 0:
		l.host = int64(t.Memory.Host * gib)
	case t.Device.Info().Place != tensor.Host && t.FreeHost > 0:
		l.host = part(t.FreeHost)
	}
	return l
}

// choices are the ways that [memory] and [tile] leave open, the simplest first. Offloading is among
// them where it is asked for, where the device has memory of its own, or where memory.host says how
// much there is for it.
func (t *Trainer) choices() (all []Choice) {
	w, layers := t.Memory, t.Model.Config.NumHiddenLayers
	offload := w.Host > 0 || t.FreeHost > 0 && t.Device.Info().Place != tensor.Host
	words := func(s string) []model.Policy {
		policy, ok := map[string]model.Policy{"keep": model.Keep, "recompute": model.Recompute, "offload": model.Offload}[s]
		switch {
		case ok:
			return []model.Policy{policy}
		case offload:
			return []model.Policy{model.Keep, model.Recompute, model.Offload}
		}
		return []model.Policy{model.Keep, model.Recompute}
	}
	tiles := []model.Tiles{t.Model.Tiles()}
	if tiles[0].MLP == model.TileAuto {
		inTiles := tiles[0]
		inTiles.MLP = t.Model.MLPTile()
		tiles = append(tiles, inTiles)
	}
	inputs := t.blockInputs(w, layers, words(w.BlockInput))
	for _, x := range tiles {
		for _, in := range inputs {
			for _, attention := range words(w.Attention) {
				for _, qkv := range words(w.QKV) {
					for _, mlp := range words(w.MLP) {
						for _, groups := range t.headGroups() {
							a := model.Activations{BlockInput: in.policy, Segment: in.segment, Attention: attention, QKV: qkv, MLP: mlp, HeadGroups: groups}
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

type blockInput struct {
	policy  model.Policy
	segment int64
}

// blockInputs are the ways to have the inputs of so many layers.
func (t *Trainer) blockInputs(w MemoryConfig, layers int64, policies []model.Policy) (all []blockInput) {
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
			case policy == model.Keep && (k == 1 || undecided(w.BlockInput) && w.Segment > 0), policy == model.Offload:
				all = append(all, blockInput{policy, k})
			case policy == model.Recompute && (k > 1 || layers == 1):
				all = append(all, blockInput{model.Keep, k})
			}
		}
	}
	return all
}

// headGroups are the numbers of groups that leave every rank a head of each.
func (t *Trainer) headGroups() []int64 {
	c := t.Model.Config
	if t.Memory.HeadGroups > 0 {
		return []int64{t.Memory.HeadGroups}
	}
	groups := []int64{1}
	for g := int64(2); g <= min(8, c.NumKeyValueHeads); g *= 2 {
		if c.NumKeyValueHeads%g == 0 && c.NumAttentionHeads/g >= int64(t.Mesh.Seq.Size()) {
			groups = append(groups, g)
		}
	}
	return groups
}

// undecided says that a word leaves the choice to the planner.
func undecided(word string) bool { return word == "" || word == "auto" }

// sensible leaves out what cannot be, and, of what nobody asked for, what keeps more than it
// computes again for.
func sensible(a *model.Activations, w *MemoryConfig) bool {
	if a.Attention == model.Recompute && a.QKV != model.Recompute {
		return false
	}
	if a.Segment > 1 && undecided(w.QKV) && undecided(w.MLP) && (a.QKV != model.Recompute || a.MLP != model.Recompute) {
		return false
	}
	return a.HeadGroups <= 1 || w.HeadGroups > 0 || a.QKV == model.Recompute
}

// plan chooses what is kept between the passes, and whether the MLP runs in tiles: of what fits on
// all ranks the way that costs the least time. It leaves the model so, and its components in
// t.planned. Collective.
func (t *Trainer) plan() error {
	free := []int64{-t.FreeHost} // what is open to choice must be the same on all ranks
	if err := t.Mesh.World.AllReduce(nil, tensor.OfInt64(free, 1), comm.Max); err != nil {
		return err
	}
	t.FreeHost = -free[0]
	if t.Train == nil {
		t.considered = []Choice{{Tiles: t.Model.Tiles()}, {Tiles: model.Tiles{MLP: t.Model.MLPTile(), Loss: t.Model.Tiles().Loss}}}
		if t.Model.Tiles().MLP != model.TileAuto {
			t.considered = t.considered[:1]
		}
	} else {
		t.considered = t.choices()
	}
	if len(t.considered) == 0 {
		return status.Errorf(status.InvalidConfig, "memory: no way to run is left: attention = %q needs qkv = \"recompute\", or let it be \"auto\"", t.Memory.Attention)
	}
	best, err := t.choose()
	if err != nil {
		return err
	}
	t.considered[best].Taken = true
	_, err = t.size(&t.considered[best])
	return err
}

// choose tries the first way by itself, for that is nearly always enough, and then all of them.
// Where none fits it is the least one, refused if there is a limit that must hold.
func (t *Trainer) choose() (int, error) {
	if err := t.try(t.considered[:1]); err != nil {
		return 0, err
	}
	if t.considered[0].fits || len(t.considered) == 1 {
		t.considered = t.considered[:1]
		return 0, t.over(&t.considered[0])
	}
	if err := t.try(t.considered); err != nil {
		return 0, err
	}
	order := make([]int, len(t.considered))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(t.considered[i].Extra, t.considered[j].Extra) })
	for _, i := range order {
		if t.considered[i].fits {
			return i, nil
		}
	}
	least := slices.MinFunc(order, func(i, j int) int { return cmp.Compare(t.considered[i].Device, t.considered[j].Device) })
	return least, t.over(&t.considered[least])
}

// try sizes ways to run, of which some may not fit on some rank. Collective.
func (t *Trainer) try(some []Choice) error {
	l, n := t.limits(), int64(len(some))
	// bytes of the device and of the host, and whether that is too much, of each
	most := make([]int64, 3*n)
	var err error
	for i := range some {
		var size [2]int64
		if size, err = t.size(&some[i]); err != nil {
			break
		}
		most[3*i], most[3*i+1] = size[0], size[1]
		if size[0] > l.device || size[1] > l.host {
			most[3*i+2] = 1
		}
		some[i].Extra = t.extra(size[1])
	}
	if err = comm.Agree(t.Mesh.World, err); err != nil {
		return err
	}
	if err := t.Mesh.World.AllReduce(nil, tensor.OfInt64(most, 3*n), comm.Max); err != nil {
		return err
	}
	for i := range some {
		some[i].Device, some[i].Host, some[i].fits = most[3*i], most[3*i+1], most[3*i+2] == 0
	}
	return nil
}

// size sets the model to a way to run, and is the bytes that this rank plans then, of the device
// and of the host.
func (t *Trainer) size(x *Choice) (bytes [2]int64, err error) {
	if err = t.Model.SetTiles(x.Tiles); err == nil {
		err = t.Model.SetActivations(x.Activations)
	}
	if status.Of(err) == status.InvalidArgument {
		err = status.Errorf(status.InvalidConfig, "[memory] and [tile] ask for what cannot be: %w", err)
	}
	if err != nil {
		return bytes, err
	}
	tokens, rows := t.MaxRows()
	if t.planned, err = t.Model.Memory(rows, tokens, t.Train != nil); err != nil {
		return bytes, err
	}
	all := t.components(t.inputBytes())
	return [2]int64{model.Bytes(all), model.HostBytes(all)}, nil
}

// Rates to weigh work against copies by, FLOP/s and bytes/s of a rank: of the order of an H100 on
// PCIe 5, where copies run beside the work, and of a core with AVX2, which does both. They rank
// choices; a plan of time would measure.
const (
	gpuFlops, gpuCopies   = 400e12, 50e9
	coreFlops, coreCopies = 50e9, 8e9
)

// extra is the expected time of what the model is set to, with so many bytes on the host: work done
// again, and copies that are longer than the work they run beside.
func (t *Trainer) extra(host int64) float64 {
	tokens, _ := t.MaxRows()
	pairs := float64(tokens) * float64(tokens) / 2
	work := t.Model.Config.Flops(tokens, pairs)
	again := t.Model.RecomputeFlops(tokens, pairs) / work
	ranks := float64(t.Mesh.Seq.Size())
	if t.Device.Info().Place == tensor.Host {
		workers := float64(max(1, t.Device.Info().Workers))
		return again + 2*float64(host)/coreCopies/(work/ranks/(coreFlops*workers))
	}
	return again + max(0, 2*float64(host)/gpuCopies/(work/ranks/gpuFlops)-1)
}

// Choices are the ways to run that were looked at and are worth looking at: none takes less memory
// of both kinds and less time. One of them is taken.
func (t *Trainer) Choices() []Choice {
	var all []Choice
	for i, x := range t.considered {
		worse := slices.ContainsFunc(t.considered, func(y Choice) bool {
			return y.Device <= x.Device && y.Host <= x.Host && y.Extra <= x.Extra && (y.Device < x.Device || y.Host < x.Host || y.Extra < x.Extra)
		})
		twin := slices.ContainsFunc(t.considered[:i], func(y Choice) bool { return y.Device == x.Device && y.Host == x.Host && y.Extra == x.Extra && !x.Taken })
		if x.Taken || !worse && !twin {
			all = append(all, x)
		}
	}
	slices.SortStableFunc(all, func(x, y Choice) int { return cmp.Compare(x.Extra, y.Extra) })
	return all
}
