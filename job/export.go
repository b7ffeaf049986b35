package job

import (
	"fmt"

	"ulysses/train"
)

// export is the verb: o.words are a checkpoint and the folder to write.
func export(o Options) error {
	from, step, err := train.Export(o.words[0], o.words[1])
	if err != nil {
		return err
	}
	return written(fmt.Fprintf(o.Stdout, "model after step %d, from %s: %s\n", step, from, o.words[1]))
}
