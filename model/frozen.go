package model

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// Portion is the parameters of a group that are stored together. Package train stores trained and
// frozen parameters apart: frozen ones have values of the compute type, and no gradients, masters
// or moments. If experts are divided, the experts of each rank are stored apart as well.
type Portion struct {
	*Group
	Index  int // of the group in Model.Groups
	Frozen bool
	// Shard is the rank that has the experts, of the ranks among which they are divided; AllRanks
	// for the other parameters.
	Shard int
}

// AllRanks is the Shard of parameters that are not of divided experts.
const AllRanks = -1

// Half returns the trained or the frozen parameters of the group, in order.
func (g *Group) Half(frozen bool) *Group {
	half := &Group{Name: g.Name}
	for _, p := range g.Params {
		if p.Frozen == frozen {
			half.Params = append(half.Params, p)
		}
	}
	return half
}

// Halves returns the trained or the frozen parameters of each group. Groups may be empty.
func Halves(groups []*Group, frozen bool) []*Group {
	all := make([]*Group, len(groups))
	for i, g := range groups {
		all[i] = g.Half(frozen)
	}
	return all
}

// Shards returns the parameters of the group that all ranks have, and the experts of each of n
// ranks; n below 2 means that all ranks have all experts. Groups may be empty.
func (g *Group) Shards(n int) (all *Group, experts []*Group) {
	all = &Group{Name: g.Name}
	if n > 1 {
		for r := range n {
			experts = append(experts, &Group{Name: fmt.Sprintf("%s, experts of rank %d of %d", g.Name, r, n)})
		}
	}
	for _, p := range g.Params {
		to := all
		if r := p.ExpertShard(n); r != AllRanks {
			to = experts[r]
		}
		to.Params = append(to.Params, p)
	}
	return all, experts
}

// Portions returns the portions that have parameters: the trained ones of each group, and then the
// frozen ones.
func (m *Model) Portions() (all []Portion) {
	n := 1
	if m.expertRanks != nil {
		n = m.expertRanks.Size()
	}
	for _, frozen := range []bool{false, true} {
		for _, x := range PortionsOf(Halves(m.groups, frozen), n) {
			x.Frozen = frozen
			all = append(all, x)
		}
	}
	return all
}

// PortionsOf returns the portions of groups that have parameters, with experts that n ranks divide;
// n below 2 means that all ranks have all experts.
func PortionsOf(groups []*Group, n int) (all []Portion) {
	for i, g := range groups {
		dense, experts := g.Shards(n)
		for shard, x := range append([]*Group{dense}, experts...) {
			if len(x.Params) > 0 {
				all = append(all, Portion{Group: x, Index: i, Shard: AllRanks + shard})
			}
		}
	}
	return all
}

// trains reports whether a parameter of the group is trained.
func (g *Group) trains() bool {
	for _, p := range g.Params {
		if !p.Frozen {
			return true
		}
	}
	return false
}

// Trained returns the number of elements of the trained parameters.
func (m *Model) Trained() int64 {
	n := int64(0)
	for _, g := range m.groups {
		for _, p := range g.Params {
			if !p.Frozen {
				n += p.Numel()
			}
		}
	}
	return n
}

// Patterns match names of parameters.
type Patterns []*regexp.Regexp

// ParsePatterns parses patterns, each of which matches whole names: a name in which * stands for
// any characters and ? for one, or "re:" and a regular expression.
func ParsePatterns(patterns []string) (Patterns, error) {
	var all Patterns
	for _, text := range patterns {
		expression, isExpression := strings.CutPrefix(text, "re:")
		if !isExpression {
			expression = strings.NewReplacer(`\*`, ".*", `\?`, ".").Replace(regexp.QuoteMeta(text))
		}
		r, err := regexp.Compile("^(?:" + expression + ")$")
		if err != nil {
			return nil, status.Errorf(status.InvalidConfig,
				"%q is not a regular expression: %v; write names with * and ?, or correct it", text, err)
		}
		all = append(all, r)
	}
	return all, nil
}

// Match returns the index of the first pattern that matches a name; -1 if none does.
func (p Patterns) Match(name string) int {
	return slices.IndexFunc(p, func(r *regexp.Regexp) bool { return r.MatchString(name) })
}

// freeze adds the adapters and marks the parameters that are not trained: those that match a
// pattern, and with adapters all others.
func (m *Model) freeze(o Options) error {
	if o.LoRA != nil {
		if err := m.addAdapters(o.LoRA); err != nil {
			return err
		}
		for _, g := range m.groups {
			for _, p := range g.Params {
				p.Frozen = !p.isAdapter()
			}
		}
	}
	patterns := o.Freeze
	all, err := ParsePatterns(patterns)
	if err != nil {
		return status.Errorf(status.Of(err), "train.freeze: %w", err)
	}
	used := make([]bool, len(all))
	for _, g := range m.groups {
		for _, p := range g.Params {
			for i, r := range all {
				if r.MatchString(p.Name) {
					p.Frozen, used[i] = true, true
				}
			}
		}
	}
	if err := m.checkFrozenExperts(); err != nil {
		return err
	}
	if err := m.checkFrozenFused(); err != nil {
		return err
	}
	if i := slices.Index(used, false); i >= 0 {
		return status.Errorf(status.InvalidConfig,
			"train.freeze: %q matches no parameter of the model; a pattern matches whole names such as %s, with * for any characters",
			patterns[i], m.groups[1].Params[1].Name)
	}
	return m.Config.family.files.refuseHalfFrozen(m.groups)
}

// gradOf returns the gradient of a parameter. Some operations always write one: for a frozen
// parameter it is working memory, whose content is not used.
func (e *executor) gradOf(w *Param) tensor.Tensor {
	if w.Frozen {
		return e.tempF32(w.Shape...)
	}
	return w.Grad
}
