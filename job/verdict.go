package job

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"text/tabwriter"
)

// verdict is what verify found, as --json prints it.
type verdict struct {
	Ranks   int        `json:"ranks"`
	Ulysses int        `json:"ulysses"`
	Data    int        `json:"data"`
	DType   string     `json:"dtype"`
	Kernels string     `json:"kernels"`
	Limit   float64    `json:"limit"` // of relative
	Same    bool       `json:"same"`  // every tensor that is judged is within it
	Tensors []compared `json:"tensors"`
}

// compared is a tensor of the run on all ranks beside the one of a single rank.
type compared struct {
	Name     string   `json:"name"`
	Shape    []int64  `json:"shape"`
	Max      quantity `json:"max"`      // max|Δ|
	Mean     quantity `json:"mean"`     // mean|Δ|
	Relative quantity `json:"relative"` // max|Δ| / max|ref|
	Bits     bool     `json:"bits_equal"`
	Judged   bool     `json:"judged"` // what is not is shown alone
	Within   bool     `json:"within"`
}

// quantity is null where it is not finite, for which JSON has no word.
type quantity float64

func (x quantity) MarshalJSON() ([]byte, error) {
	if v := float64(x); !math.IsInf(v, 0) && v == v {
		return strconv.AppendFloat(nil, v, 'g', -1, 64), nil
	}
	return []byte("null"), nil
}

func (r *verdict) print(out io.Writer, asJSON bool) error {
	if asJSON {
		text, err := json.MarshalIndent(r, "", " ")
		if err == nil {
			_, err = fmt.Fprintf(out, "%s\n", text)
		}
		return err
	}
	fmt.Fprintf(out, "%d ranks (ulysses %d x data %d) against one, in %s, kernels %s\n\n", r.Ranks, r.Ulysses, r.Data, r.DType, r.Kernels)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "tensor\tshape\tmax |Δ|\tmean |Δ|\tmax |Δ| / max |ref|\tbits")
	for _, x := range r.Tensors {
		bits, far := "equal", ""
		if !x.Bits {
			bits = "differ"
		}
		if x.Judged && !x.Within {
			far = "  TOO FAR"
		}
		fmt.Fprintf(w, "%s\t%v\t%.2e\t%.2e\t%.2e\t%s%s\n", x.Name, x.Shape, x.Max, x.Mean, x.Relative, bits, far)
	}
	if err := w.Flush(); err != nil || !r.Same {
		return err
	}
	_, err := fmt.Fprintf(out, "\nthe same within %g\n", r.Limit)
	return err
}
