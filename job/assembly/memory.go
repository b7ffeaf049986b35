package assembly

import (
	"fmt"
	"io"
	"text/tabwriter"

	"ulysses/device"
	"ulysses/internal/units"
	"ulysses/model"
	"ulysses/tensor"
	"ulysses/train"
)

// PrintMemory prints a rank's planned memory, and the choices of all ranks, as tables.
func (p *Parts) PrintMemory(out io.Writer, t *train.Trainer, plan RankPlan) error {
	if err := PrintComponents(out, plan, p.Device.Info(), p.HostOfNode(), p.Model.Tiles()); err != nil {
		return err
	}
	if trained, all := p.Model.Trained(), p.Model.Numel(); trained < all {
		fmt.Fprintf(out, "trained: %d of %d parameters, %.3g %%\n\n", trained, all, 100*float64(trained)/float64(all))
	}
	if p.step != "" {
		fmt.Fprintf(out, "optimizer step: %s\n\n", p.step)
	}
	if err := printChoices(out, t); err != nil {
		return err
	}
	if plan := p.Model.Linear(); plan != nil {
		fmt.Fprintf(out, "linear attention: %v\n\n", plan)
	}
	return nil
}

// RankPlan is the planned memory of a rank.
type RankPlan struct {
	Rank       string // in the heading of the table, as "a rank" or "rank 3"
	Components []model.Component
}

// HostMemory is the host memory of the ranks of a node.
type HostMemory struct {
	Ranks int
	Free  int64 // bytes that these ranks may allocate; 0 = unknown
}

// HostOfNode returns the host memory of this rank's node.
func (p *Parts) HostOfNode() HostMemory {
	ranks := max(1, min(p.PerNode, p.Mesh.World.Size()))
	return HostMemory{Ranks: ranks, Free: p.FreeHost * int64(ranks)}
}

// print prints the host memory that the ranks of a node plan, if each plans as much as this one.
func (n HostMemory) print(w io.Writer, ofRank int64) {
	all := ofRank * int64(n.Ranks)
	fmt.Fprintf(w, "planned, host of a node with %s\t%d\t%.1f\t\n", units.Count(n.Ranks, "rank"), all, units.MiB(all))
	if n.Free > 0 {
		fmt.Fprintf(w, "of the host\t%d\t%.1f\t\n", n.Free, units.MiB(n.Free))
	}
}

// PrintComponents prints the components of a plan with the memory of the device and of the node.
func PrintComponents(out io.Writer, of RankPlan, info device.Info, node HostMemory, tiles model.Tiles) error {
	w, plan := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight), of.Components
	fmt.Fprintf(w, "memory of %s\tbytes\tMiB\t\n", of.Rank)
	for _, c := range plan {
		fmt.Fprintf(w, "%s\t%d\t%.1f\t\n", c.Name, c.Bytes, units.MiB(c.Bytes))
	}
	fmt.Fprintf(w, "planned\t%d\t%.1f\t\n", model.Bytes(plan), units.MiB(model.Bytes(plan)))
	if host := model.HostBytes(plan); host > 0 {
		fmt.Fprintf(w, "planned, host\t%d\t%.1f\t\n", host, units.MiB(host))
		node.print(w, host)
	} else if info.Place == tensor.Host && node.Ranks > 1 {
		node.print(w, model.Bytes(plan))
	}
	if info.Memory > 0 {
		name := "of the device"
		if info.Sharing > 1 {
			name = fmt.Sprintf("of the device, which %d ranks share", info.Sharing)
		}
		fmt.Fprintf(w, "%s\t%d\t%.1f\t\n", name, info.Memory, units.MiB(info.Memory))
	}
	if info.Free > 0 {
		fmt.Fprintf(w, "of it free\t%d\t%.1f\t\n", info.Free, units.MiB(info.Free))
	}
	for _, x := range TilesUsed(tiles, info) {
		fmt.Fprintf(w, "%s\t%d tokens\t\t\n", x.Name, x.Tokens)
	}
	fmt.Fprintln(w)
	return w.Flush()
}

// TileUsed is a part of a layer that computes so many tokens at a time.
type TileUsed struct {
	Name   string
	Tokens int64
}

// TilesUsed returns the tiles with a number of tokens that have an effect on a device.
func TilesUsed(t model.Tiles, info device.Info) (all []TileUsed) {
	if t.MLP > 0 {
		all = append(all, TileUsed{"MLP in tiles of", t.MLP})
	}
	if t.GDN > 0 && info.Place != tensor.Host {
		all = append(all, TileUsed{"gated delta rule in panels of", t.GDN})
	}
	return all
}

// printChoices prints the policies for saved activations that were considered, with their memory
// and time. It prints nothing if there was nothing to choose.
func printChoices(out io.Writer, t *train.Trainer) error {
	choices := t.Choices()
	if len(choices) == 1 && choices[0].Extra == 0 && !choices[0].Offloads() {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "activations\tMiB\ton the host\texpected time\t")
	for _, c := range choices {
		mark := ""
		if c.Chosen {
			mark = "chosen"
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%s\t%s\n", DescribeChoice(c), units.MiB(c.Device), units.MiB(c.Host),
			fmt.Sprintf("+%.1f %%", 100*c.Extra), mark)
	}
	fmt.Fprintln(w)
	return w.Flush()
}

// DescribeChoice returns the policies of a choice as text.
func DescribeChoice(c train.Choice) string {
	text := c.Activations.String()
	if c.Tiles.MLP > 0 {
		text += fmt.Sprintf(" in tiles of %d", c.Tiles.MLP)
	}
	if c.Tiles.GDN > 0 {
		text += fmt.Sprintf(", gated delta rule in panels of %d", c.Tiles.GDN)
	}
	if c.Waits {
		text += ", no checkpoint copy"
	}
	return text
}
