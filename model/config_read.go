package model

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// reader reads fields of a decoded JSON object or TOML table and collects faults.
type reader struct {
	where  string // begins the error message
	raw    map[string]any
	seen   map[string]bool // the fields that were read
	faults []string
	wrong  bool // a fault has another code than Unsupported

	strict   bool     // the user's own table: unknown fields are faults
	fresh    bool     // a new model: no field has the default of one published model
	unknowns []string // faults for unknown fields of nested tables

	unknownType bool // the model type is not built: other fields are not checked

	optional map[string]bool // fields whose null is no fault
}

// longest is the length in bytes from which values are abbreviated in messages.
const longest = 500

func (r *reader) fault(code status.Code, format string, args ...any) {
	for i, x := range args {
		if s := fmt.Sprint(x); len(s) > longest {
			args[i] = input.Short(s)
		}
	}
	r.faults = append(r.faults, fmt.Sprintf(format, args...))
	r.wrong = r.wrong || code != status.Unsupported
}

// err returns an error that lists all faults, or nil. The code is Unsupported if every fault is
// something that is not built, otherwise InvalidConfig.
func (r *reader) err() error {
	code := status.Unsupported
	if r.wrong {
		code = status.InvalidConfig
	}
	return list(code, r.where, r.faults)
}

// list returns an error that lists faults, or nil if there are none.
func list(code status.Code, where string, faults []string) error {
	const most = 20
	var all []string
	for _, f := range faults {
		all = append(all, where+": "+f)
	}
	n := len(faults)
	switch {
	case n == 0:
		return nil
	case n == 1:
		return &status.Error{Code: code, Text: all[0], Faults: all}
	case n > most:
		faults = append(faults[:most:most], fmt.Sprintf("and %d more", n-most))
	}
	return &status.Error{Code: code, Text: fmt.Sprintf("%s:\n  %s", where, strings.Join(faults, "\n  ")), Faults: all}
}

func (r *reader) value(name string) any { r.seen[name] = true; return r.raw[name] }
func (r *reader) has(name string) bool  { return r.value(name) != nil }

// quoted returns a value for an error. Text has its quotes: without them, "32" in the place of a
// number looks right.
func quoted(v any) string {
	if text, ok := v.(string); ok {
		return strconv.Quote(input.Short(text))
	}
	return fmt.Sprint(v)
}

// ineffective adds a fault if the user's own table has a field that has no effect in the family. A
// file may have it, as in transformers.
func (r *reader) ineffective(name, fix string) {
	v := r.value(name)
	if x, number := asFloat(v); !r.strict || v == nil || v == false || number && x == 0 {
		return
	}
	r.fault(status.InvalidConfig, "%s = %s has no effect in %v; %s", name, quoted(v), r.raw["model_type"], fix)
	r.unknowns = append(r.unknowns, r.faults[len(r.faults)-1])
}

func (r *reader) text(name, def string) string {
	if r.missing(name) {
		return def
	}
	switch v := r.value(name).(type) {
	case string:
		return v
	default:
		r.fault(status.InvalidConfig, "%s = %v: give a text in quotes", name, v)
		return def
	}
}

func (r *reader) flag(name string, def bool) bool {
	if r.missing(name) {
		return def
	}
	switch v := r.value(name).(type) {
	case bool:
		return v
	default:
		r.fault(status.InvalidConfig, "%s = %s: give true or false", name, quoted(v))
		return def
	}
}

func (r *reader) number(name string, def float64) float64 {
	if r.missing(name) {
		return def
	}
	v := r.value(name)
	f, ok := asFloat(v)
	if !ok || math.IsNaN(f) {
		r.fault(status.InvalidConfig, "%s = %s: give a number", name, quoted(v))
		return def
	}
	return f
}

func (r *reader) positive(name string, def float64) float64 {
	f := r.number(name, def)
	if !(f > 0) || math.IsInf(f, 0) {
		r.fault(status.InvalidConfig, "%s = %v: give a number above 0", name, f)
		return def
	}
	return f
}

// probability reads a probability below 1.
func (r *reader) probability(name string, def float64) float64 {
	x := r.number(name, def)
	if !(x >= 0 && x < 1) {
		r.fault(status.InvalidConfig, "%s = %v; set a probability of at least 0 and below 1", name, x)
	}
	return x
}

// extent reads a whole number in [1, most]. With def 0, the field is required.
func (r *reader) extent(name string, def, most int64) int64 {
	if def == 0 { // a null is missing as well
		r.accepts(name)
	}
	if r.missing(name) {
		if def == 0 {
			r.fault(status.InvalidConfig, "%s is missing: give a whole number of at least 1", name)
		}
		return def
	}
	v := r.value(name)
	n, ok := asInt(v)
	if !ok || n < 1 || n > most {
		r.fault(status.InvalidConfig, "%s = %s: give a whole number from 1 to %d", name, quoted(v), most)
		return def
	}
	return n
}

// count reads a whole number in [0, most].
func (r *reader) count(name string, def, most int64) int64 {
	if r.missing(name) {
		return def
	}
	v := r.value(name)
	n, ok := asInt(v)
	if !ok || n < 0 || n > most {
		r.fault(status.InvalidConfig, "%s = %s: give a whole number from 0 to %d", name, quoted(v), most)
		return def
	}
	return n
}

// table returns a reader of a nested object, or nil if there is none.
func (r *reader) table(name string) *reader {
	switch v := r.value(name).(type) {
	case nil:
		return nil
	case map[string]any:
		return &reader{where: r.where, raw: v, seen: map[string]bool{}, strict: r.strict}
	default:
		r.fault(status.InvalidConfig, "%s = %s: give a table of fields", name, quoted(v))
		return nil
	}
}

// adopt adds the faults of a nested reader, with the name of the table.
func (r *reader) adopt(name string, t *reader) {
	for _, f := range t.faults {
		r.faults = append(r.faults, name+"."+f)
	}
	for _, f := range t.unknowns {
		r.unknowns = append(r.unknowns, name+"."+f)
	}
	r.wrong = r.wrong || t.wrong
}

// notes are known fields that are not read: they do not change the computation.
var notes = []string{"architectures", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
	"transformers_version", "pretraining_tp", "_name_or_path", "name_or_path", "mamba_ssm_dtype",
	"mtp_num_hidden_layers",
	"mtp_use_dedicated_embeddings"}

// elsewhere has fields of other programs for training, and what has their effect here.
var elsewhere = map[string]string{
	"aux_loss_alpha": "set output_router_logits = true and router_aux_loss_coef",
	"seq_aux":        "remove it; the loss that balances experts is over all tokens of a step",
}

// unknown adds a fault for each field that is not known, with the known field that is closest.
func (r *reader) unknown() {
	if r.unknownType {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(r.raw)) {
		if r.seen[name] || slices.Contains(notes, name) {
			continue
		}
		best, least := "", min(len(name)/2, longest)+1
		for known := range r.seen {
			if d := distance(name[:min(len(name), longest)], known); d < least || d == least && known < best {
				best, least = known, d
			}
		}
		if instead := elsewhere[name]; instead != "" {
			r.fault(status.InvalidConfig, "%s: unknown field; %s", name, instead)
		} else if best != "" {
			r.fault(status.InvalidConfig, "%s: unknown field; did you mean %s?", name, best)
		} else {
			r.fault(status.InvalidConfig, "%s: unknown field; remove it", name)
		}
		r.unknowns = append(r.unknowns, r.faults[len(r.faults)-1])
	}
}

// distance returns the number of edits between two names (Levenshtein 1966).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// asFloat converts the number types of JSON (as text) and TOML.
func asFloat(v any) (float64, bool) {
	switch v := v.(type) {
	case json.Number:
		f, err := v.Float64()
		return f, err == nil
	case float64:
		return v, true
	case int64:
		return float64(v), true
	case int:
		return float64(v), true
	}
	return 0, false
}

// asInt is asFloat for whole numbers.
func asInt(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case int:
		return int64(v), true
	}
	f, ok := asFloat(v)
	n := int64(f)
	return n, ok && math.Abs(f) < 1<<53 && float64(n) == f
}
