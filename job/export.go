package job

import (
	"fmt"

	"ulysses/train"
)

// export is the verb: o.words are a checkpoint and the folder to write.
func export(o Options) error {
	from, step, skipped, err := train.Export(o.words[0], o.words[1], o.force)
	if err != nil {
		return err
	}
	for _, why := range skipped {
		if err := written(fmt.Fprintf(o.Stdout, "skipped: %s\n", why)); err != nil {
			return err
		}
	}
	return written(fmt.Fprintf(o.Stdout, "model after step %d, from %s: %s\n", step, from, o.words[1]))
}
