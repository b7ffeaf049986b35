package report

import (
	"slices"
)

// trafficRow holds the bytes that all ranks together have sent in one operation on one axis, and
// the bytes by its formula.
type trafficRow struct {
	Axis, Op, What string
	Calls          int64 // of the rank with the most calls
	Sent, Formula  int64
	Least, Most    int64 // sent by one rank
	Equal          bool  // sent = formula on every rank
	Control        bool  // there is no formula: counts, sums of losses, flags, errors
}

type trafficKey struct{ axis, op string }

// trafficTable adds up traffic over the ranks.
type trafficTable struct {
	rows    []trafficRow
	index   map[trafficKey]int // into rows
	control trafficRow
}

// trafficRows compares bytes sent with formulas, rank by rank: errors of two ranks in opposite
// directions do not cancel out. The last row has the control messages of all axes.
func trafficRows(facts []rankFacts) []trafficRow {
	t := trafficTable{index: map[trafficKey]int{},
		control: trafficRow{Control: true, Axis: "all", Op: "control",
			What: "counts, sums of losses, norms, flags, errors"}}
	for i := range facts {
		t.add(&facts[i])
	}
	rows := slices.DeleteFunc(t.rows, func(r trafficRow) bool { return r.Calls == 0 && r.Sent == 0 && r.Formula == 0 })
	return append(rows, t.control)
}

// row returns the row of an operation, which it adds if it is missing.
func (t *trafficTable) row(k trafficKey) *trafficRow {
	i, ok := t.index[k]
	if !ok {
		i = len(t.rows)
		t.index[k] = i
		t.rows = append(t.rows, trafficRow{Axis: k.axis, Op: k.op, Equal: true, Least: -1})
	}
	return &t.rows[i]
}

// add adds the traffic of one rank.
func (t *trafficTable) add(f *rankFacts) {
	sent, formula := map[trafficKey]int64{}, map[trafficKey]int64{}
	for _, x := range f.Formula {
		k := trafficKey{x.Axis, x.Op}
		if r := t.row(k); r.What == "" {
			r.What = x.What
		}
		formula[k] += x.Bytes
	}
	control := int64(0)
	for _, e := range f.Sent {
		if e.Control {
			t.control.Sent += e.Bytes
			control += e.Calls
			continue
		}
		k := trafficKey{e.Axis, e.Op}
		r := t.row(k)
		r.Calls = max(r.Calls, e.Calls)
		sent[k] += e.Bytes
	}
	t.control.Calls = max(t.control.Calls, control)
	for i := range t.rows {
		r := &t.rows[i]
		k := trafficKey{r.Axis, r.Op}
		r.Sent += sent[k]
		r.Formula += formula[k]
		r.Equal = r.Equal && sent[k] == formula[k]
		if r.Most = max(r.Most, sent[k]); r.Least < 0 || sent[k] < r.Least {
			r.Least = sent[k]
		}
	}
}

// trafficVerdict compares the bytes sent by all operations with the formulas.
func trafficVerdict(ranks int, traffic []trafficRow) factRow {
	if ranks == 1 {
		return factRow{"traffic", "none", "one rank sends nothing"}
	}
	for _, t := range traffic {
		if !t.Control && !t.Equal {
			return factRow{"traffic", "NOT EQUAL", t.Op + " on axis " + t.Axis +
				": the bytes sent differ from the formula"}
		}
	}
	return factRow{"traffic", "equal", "bytes sent = formulas"}
}
