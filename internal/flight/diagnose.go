package flight

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// silence is how long a process may show no sign of life, compared with the others. A launcher
// kills a job soon after it has sent a signal to the processes that are left; endSilence is the
// limit then.
const (
	silence    = 3 * time.Second
	endSilence = 350 * time.Millisecond
)

// Condition says what a rank did when the records were written.
type Condition string

const (
	NoRecord Condition = "no record"      // the rank has left no file
	Gone     Condition = "not responding" // killed, stopped, or its host is gone
	Waits    Condition = "waiting"        // in an operation, for other ranks
	Inside   Condition = "in an operation"
	Between  Condition = "between operations"
	Broke    Condition = "failed"
	Done     Condition = "finished"
)

// Standing is what Diagnose has found out about one rank.
type Standing struct {
	Rank      int           `json:"rank"`
	Host      string        `json:"host,omitempty"`
	Condition Condition     `json:"condition"`
	Operation string        `json:"operation,omitempty"` // in progress, or the last one
	For       time.Duration `json:"-"`                   // since the operation began (Waits, Inside) or ended
	Seconds   float64       `json:"seconds"`             // For
	Step      int64         `json:"step"`
	Awaits    []int         `json:"awaits,omitempty"` // the ranks that have not begun the operation
	Text      string        `json:"text,omitempty"`   // the error of a rank that failed
}

// Culprit is a rank that keeps the others from continuing.
type Culprit struct {
	Rank      int    `json:"rank"`
	Host      string `json:"host,omitempty"`
	Operation string `json:"operation,omitempty"` // the operation in which the others wait for it
	Waiting   int    `json:"waiting"`             // ranks that wait in this operation
	Text      string `json:"text"`                // a sentence with all of this
}

// Diagnosis is the comparison of the records of all ranks.
type Diagnosis struct {
	Ranks    []Standing `json:"ranks"`
	Culprits []Culprit  `json:"culprits"` // of one kind, such as ranks that are gone; in the order of ranks
	Text     string     `json:"text"`     // of the culprits, or the reason why there is none
}

// key identifies an operation of a group.
type key struct {
	group Group
	seq   int64
}

// called is what a rank has called: an operation, with a checksum of what must be equal.
type called struct {
	op       string
	checksum uint8
}

// comparison has what the ranks have begun.
type comparison struct {
	ranks []*Rank
	now   time.Duration
	limit time.Duration           // silence or endSilence
	begun map[Group]map[int]int64 // the last number that each rank has begun
	ops   map[key]map[int]called  // what each rank has called
	first map[Group]map[int]int64 // the first number that is in the ring
}

// Diagnose compares the records of all ranks, which ReadFolder returns. A rank keeps others waiting
// if it has not begun an operation of a group in which they are, and does not wait itself; if it
// has called another operation than the majority under the same number, or with other sizes; if it
// has sent a message of a wrong length; or if its process is gone.
func Diagnose(ranks []*Rank) *Diagnosis {
	c := newComparison(ranks)
	d := &Diagnosis{Ranks: make([]Standing, len(ranks))}
	for i := range ranks {
		d.Ranks[i] = c.standing(i)
	}
	for _, find := range []func([]Standing) []Culprit{c.odd, c.blamed, c.broken, c.gone, c.behind} {
		if d.Culprits = find(d.Ranks); len(d.Culprits) > 0 {
			break
		}
	}
	lines := make([]string, len(d.Culprits))
	for i, x := range d.Culprits {
		lines[i] = x.Text
	}
	if d.Text = strings.Join(lines, "\n"); d.Text == "" {
		d.Text = c.undecided(d.Ranks)
		d.Culprits = []Culprit{} // a list in JSON, and not null
	}
	return d
}

func newComparison(ranks []*Rank) *comparison {
	c := &comparison{ranks: ranks, limit: silence, begun: map[Group]map[int]int64{}, first: map[Group]map[int]int64{},
		ops: map[key]map[int]called{}}
	for i, r := range ranks {
		if r == nil {
			continue
		}
		if c.now = max(c.now, r.Beat, r.Ended); r.Signalled {
			c.limit = endSilence
		}
		for _, call := range r.Calls {
			g := call.Group
			if c.begun[g] == nil {
				c.begun[g], c.first[g] = map[int]int64{}, map[int]int64{}
			}
			if _, seen := c.first[g][i]; !seen {
				c.first[g][i] = call.Seq
			}
			c.begun[g][i] = max(c.begun[g][i], call.Seq)
			k := key{g, call.Seq}
			if c.ops[k] == nil {
				c.ops[k] = map[int]called{}
			}
			c.ops[k][i] = called{call.Op, call.Checksum}
		}
	}
	return c
}

// standing returns what a rank does, and for whom it waits.
func (c *comparison) standing(i int) Standing {
	r := c.ranks[i]
	if r == nil {
		return Standing{Rank: i, Condition: NoRecord}
	}
	s := Standing{Rank: i, Host: r.Host, Step: r.Step, Text: r.Text, Condition: Between}
	if last := r.Last(); last != nil {
		s.Operation, s.For = last.String(), c.now-last.Ended
	}
	if call := r.InProgress(); call != nil {
		s.Operation, s.For, s.Condition = call.String(), c.now-call.Began, Inside
		if s.Awaits = c.awaited(call); len(s.Awaits) > 0 {
			s.Condition = Waits
		}
	}
	switch {
	case r.State == Failed:
		s.Condition = Broke
	case r.State == Finished:
		s.Condition = Done
	case r.State == Running && !r.Signalled && c.now-r.Beat > c.limit:
		s.Condition = Gone
	}
	s.For = max(0, s.For) // the operation may be younger than the last sign of life
	s.Seconds = s.For.Seconds()
	return s
}

// awaited returns the ranks that have not begun a call's operation.
func (c *comparison) awaited(call *Call) (ranks []int) {
	for i, r := range c.ranks {
		if call.Group.Has(i) && (r == nil || c.begun[call.Group][i] < call.Seq) {
			ranks = append(ranks, i)
		}
	}
	return ranks
}

// culprit describes a rank, with the operation in which most ranks wait for it.
func (c *comparison) culprit(all []Standing, i int, what string) Culprit {
	s := &all[i]
	x := Culprit{Rank: i, Host: s.Host}
	waiting := map[string][]int{}
	for _, other := range all {
		if slices.Contains(other.Awaits, i) {
			waiting[other.Operation] = append(waiting[other.Operation], other.Rank)
		}
	}
	var longest time.Duration
	for op, ranks := range waiting {
		if len(ranks) > x.Waiting || len(ranks) == x.Waiting && op < x.Operation {
			x.Operation, x.Waiting, longest = op, len(ranks), 0
			for _, r := range ranks {
				longest = max(longest, all[r].For)
			}
		}
	}
	x.Text = fmt.Sprintf("rank %d%s %s", i, onHost(s.Host), what)
	if x.Waiting > 0 {
		x.Text += fmt.Sprintf("; %s for it in %s for %.1f s", counted(x.Waiting, "rank waits", "ranks wait"),
			x.Operation, longest.Seconds())
	}
	switch {
	case s.Operation == "":
	case s.Condition == Inside || s.Condition == Waits || s.Condition == Gone && c.ranks[i].InProgress() != nil:
		x.Text += fmt.Sprintf("; it is in %s", s.Operation)
		if x.Operation == "" {
			x.Operation = s.Operation
		}
	default:
		x.Text += fmt.Sprintf("; its last operation was %s, which ended %.1f s before", s.Operation, s.For.Seconds())
	}
	if x.Operation == "" {
		x.Operation = s.Operation
	}
	return x
}

func onHost(host string) string {
	if host == "" {
		return ""
	}
	return " on host " + host
}

func counted(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// broken returns the rank that failed first.
func (c *comparison) broken(all []Standing) []Culprit {
	first := -1
	for i, s := range all {
		if s.Condition == Broke && (first < 0 || c.ranks[i].Ended < c.ranks[first].Ended) {
			first = i
		}
	}
	if first < 0 {
		return nil
	}
	text, _, _ := strings.Cut(all[first].Text, "\n")
	return []Culprit{c.culprit(all, first, "failed: "+text)}
}

// odd returns the ranks that have called another operation than the majority, in the first
// operation in which the ranks differ.
func (c *comparison) odd(all []Standing) []Culprit {
	keys := make([]key, 0, 16)
	for k, names := range c.ops {
		if differ(names) {
			keys = append(keys, k)
		}
	}
	if len(keys) == 0 {
		return nil
	}
	// the first difference in time: later ones are its consequences
	earliest := make(map[key]time.Duration, len(keys))
	for _, k := range keys {
		earliest[k] = 1<<63 - 1
	}
	for _, r := range c.ranks {
		if r == nil {
			continue
		}
		for _, call := range r.Calls {
			k := key{call.Group, call.Seq}
			if t, ok := earliest[k]; ok {
				earliest[k] = min(t, call.Began)
			}
		}
	}
	k := slices.MinFunc(keys, func(a, b key) int { return cmp.Compare(earliest[a], earliest[b]) })
	votes := map[called][]int{}
	for i, x := range c.ops[k] {
		votes[x] = append(votes[x], i)
	}
	usual, tie := called{}, false
	for x, ranks := range votes {
		switch n := len(votes[usual]); {
		case len(ranks) > n:
			usual, tie = x, false
		case len(ranks) == n && x != usual:
			tie = true
		}
	}
	var found []Culprit
	for x, ranks := range votes {
		if x == usual && !tie {
			continue
		}
		other := usual.op
		if other == x.op {
			other = "it with another size or type"
		}
		for _, i := range ranks {
			what := fmt.Sprintf("has called %s where %s called %s: operation #%d on %v", x.op,
				counted(len(votes[usual]), "rank has", "ranks have"), other, k.seq, k.group)
			if tie {
				what = fmt.Sprintf(
					"has called %s as operation #%d on %v, where other ranks have called another operation, or one with another size or type",
					x.op, k.seq, k.group)
			}
			y := c.culprit(all, i, what)
			y.Operation = fmt.Sprintf("%s #%d on %v", x.op, k.seq, k.group)
			found = append(found, y)
		}
	}
	slices.SortFunc(found, func(a, b Culprit) int { return a.Rank - b.Rank })
	return found
}

func differ(calls map[int]called) bool {
	first, any := called{}, false
	for _, x := range calls {
		if any && x != first {
			return true
		}
		first, any = x, true
	}
	return false
}

// blamed returns the ranks whose messages had a wrong length for most of the ranks that say so.
func (c *comparison) blamed(all []Standing) (found []Culprit) {
	votes, most := make([]int, len(all)), 0
	for _, r := range c.ranks {
		if r != nil && r.Blames >= 0 && r.Blames < len(all) {
			votes[r.Blames]++
			most = max(most, votes[r.Blames])
		}
	}
	for i, n := range votes {
		if n > 0 && n == most {
			found = append(found,
				c.culprit(all, i,
					fmt.Sprintf("has sent a message of another length than its receiver expects, as %s",
						counted(n, "rank says", "ranks say"))))
		}
	}
	return found
}

// gone returns the ranks whose processes are gone or were never there.
func (c *comparison) gone(all []Standing) (found []Culprit) {
	for i, s := range all {
		switch s.Condition {
		case Gone:
			found = append(found,
				c.culprit(all, i,
					fmt.Sprintf(
						"does not respond (its process is killed or stopped, or its host is gone): its last sign of life was %.1f s before",
						(c.now-c.ranks[i].Beat).Seconds())))
		case NoRecord:
			found = append(found,
				c.culprit(all, i,
					"has left no record: its process ended before the first step, or it does not see this folder"))
		}
	}
	return found
}

// behind returns the ranks that others await and that await no rank themselves.
func (c *comparison) behind(all []Standing) (found []Culprit) {
	awaited := map[int]bool{}
	for _, s := range all {
		for _, i := range s.Awaits {
			awaited[i] = true
		}
	}
	for i, s := range all {
		if awaited[i] && len(s.Awaits) == 0 {
			what := "is late"
			if s.Condition == Done {
				what = "has finished while others continue"
			}
			found = append(found, c.culprit(all, i, what))
		}
	}
	if len(found) > 0 || len(awaited) == 0 {
		return found
	}
	// each awaited rank awaits another one: a cycle, in which the smallest step is behind
	least := int64(1<<63 - 1)
	for i := range awaited {
		least = min(least, all[i].Step)
	}
	for i := range all {
		if awaited[i] && all[i].Step == least {
			found = append(found,
				c.culprit(all, i, fmt.Sprintf("waits for ranks %v, which wait for it", all[i].Awaits)))
		}
	}
	return found
}

// undecided says why no rank is a culprit.
func (c *comparison) undecided(all []Standing) string {
	inside := map[string]int{}
	for _, s := range all {
		if s.Condition == Inside {
			inside[s.Operation]++
		}
	}
	most := "" // the operation with the most ranks, of several the one with the lowest rank
	for _, s := range all {
		if s.Condition == Inside && inside[s.Operation] > inside[most] {
			most = s.Operation
		}
	}
	if n := inside[most]; n > 1 {
		return fmt.Sprintf(
			"no rank is behind: %d ranks have begun %s and none has ended it; check the network and the GPUs", n, most)
	}
	return "no rank is behind: no rank waits for another"
}
