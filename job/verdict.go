package job

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"text/tabwriter"

	"ulysses/internal/units"
	"ulysses/job/file"
)

// verdict is the result of verify, as --json prints it.
type verdict struct {
	Verdict string     `json:"verdict"` // bitwise, within tolerance or FAIL, for the judged tensors
	Ranks   int        `json:"ranks"`
	Ulysses int        `json:"ulysses"`
	Ring    int        `json:"ring"`
	Experts int        `json:"experts,omitempty"`
	Data    int        `json:"data"`
	DType   string     `json:"dtype"`
	Kernels string     `json:"kernels"`
	Limit   float64    `json:"limit"` // of relative
	Same    bool       `json:"same"`  // every judged tensor is within the limit
	Tensors []compared `json:"tensors"`
}

// compared is a tensor of the run on all ranks, compared with the run on one rank.
type compared struct {
	Name     string   `json:"name"`
	Shape    []int64  `json:"shape"`
	Max      quantity `json:"max"`      // max|Δ|
	Mean     quantity `json:"mean"`     // mean|Δ|
	Relative quantity `json:"relative"` // max|Δ| / max|ref|
	Bits     bool     `json:"bits_equal"`
	Judged   bool     `json:"judged"` // false = the tensor does not count for the verdict
	Zero     bool     `json:"zero"`   // zero up to rounding: a gradient, or weights with this gradient
	Within   bool     `json:"within"`
	// max|Δ| / max|ref| that a change of all weights in their last bit causes; of tensors beyond
	// the limit
	Rounding quantity `json:"rounding,omitempty"`
}

// quantity is null in JSON if it is NaN or Inf.
type quantity float64

func (x quantity) MarshalJSON() ([]byte, error) {
	if v := float64(x); !math.IsInf(v, 0) && v == v {
		return strconv.AppendFloat(nil, v, 'g', -1, 64), nil
	}
	return []byte("null"), nil
}

const (
	bitwise = "bitwise"
	within  = "within tolerance"
	failed  = "FAIL"
)

// judge sets the verdict and returns the number of judged tensors, and the number of those that are
// out of tolerance.
func (r *verdict) judge() (judged, far int) {
	r.Verdict = bitwise
	for _, x := range r.Tensors {
		if !x.Judged {
			continue
		}
		judged++
		if !x.Within {
			far++
		}
		if !x.Bits && r.Verdict == bitwise {
			r.Verdict = within
		}
	}
	if r.Same = far == 0; far > 0 {
		r.Verdict = failed
	}
	return judged, far
}

// mesh returns the mesh on which the tensors were computed.
func (r *verdict) mesh() file.Mesh {
	return file.Mesh{Ulysses: int64(r.Ulysses), Ring: int64(r.Ring), Replicas: int64(r.Data), Experts: int64(r.Experts)}
}

// sentence returns the verdict with its counts.
func (r *verdict) sentence() string {
	judged, far := r.judge()
	equal, zero, rounded, most := 0, 0, 0, quantity(0)
	for _, x := range r.Tensors {
		switch {
		case !x.Judged:
		case x.Bits:
			equal++
		case x.Zero:
			zero++
		default:
			most = max(most, x.Relative)
			if x.Within && float64(x.Relative) > r.Limit {
				rounded++
			}
		}
	}
	text := fmt.Sprintf("%s: ", r.Verdict)
	switch on := fmt.Sprintf("on %s (%v) and on one", units.Count(r.Ranks, "rank"), r.mesh()); r.Verdict {
	case bitwise:
		text += fmt.Sprintf("%s bitwise equal %s", units.Count(judged, "tensor"), on)
	case within:
		text += fmt.Sprintf("%s %s differ by at most %.1e of the largest element (limit %g); %d are bitwise equal",
			units.Count(judged, "tensor"), on, most, r.Limit, equal)
		if rounded > 0 {
			text += fmt.Sprintf(
				"; %d beyond the limit differ by less than %d times as much as a change of all weights in their last bit changes them",
				rounded, roundings)
		}
	default:
		text += fmt.Sprintf("%d of %s %s differ by more than %g of the largest element, by up to %.1e", far,
			units.Count(judged, "tensor"), on, r.Limit, most)
	}
	if zero > 0 {
		text += fmt.Sprintf("; %d are zero up to rounding", zero)
	}
	return fmt.Sprintf("%s (%s, kernels %s)", text, r.DType, r.Kernels)
}

// print writes the verdict, then the tensors that are out of tolerance, or all.
func (r *verdict) print(out io.Writer, all bool) error {
	if _, err := fmt.Fprintln(out, r.sentence()); err != nil || !all && r.Same {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\ntensor\tshape\tmax |Δ|\tmean |Δ|\tmax |Δ| / max |ref|\tbits\tverdict")
	for _, x := range r.Tensors {
		bits, judgement := "equal", "not judged"
		if !x.Bits {
			bits = "differ"
		}
		switch {
		case x.Judged && !x.Within:
			judgement = "FAIL"
		case x.Judged && x.Zero:
			judgement = "ok: zero up to rounding"
		case x.Judged:
			judgement = "ok"
		}
		if all || judgement == "FAIL" {
			fmt.Fprintf(w, "%s\t%v\t%.2e\t%.2e\t%.2e\t%s\t%s\n", x.Name, x.Shape, x.Max, x.Mean, x.Relative, bits,
				judgement)
		}
	}
	return w.Flush()
}

// printJSON writes the verdict as JSON.
func (r *verdict) printJSON(out io.Writer) error {
	r.judge()
	text, err := json.MarshalIndent(r, "", " ")
	if err == nil {
		_, err = fmt.Fprintf(out, "%s\n", text)
	}
	return err
}
