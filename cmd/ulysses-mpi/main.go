// Command ulysses-mpi trains transformers on sequences that no single device could hold. See
// docs/job-file.md and ulysses-mpi --help.
package main

import (
	"os"

	"ulysses/job"
)

func main() {
	catchCrashes()
	os.Exit(int(job.Main(os.Args[1:], os.Stdout, os.Stderr)))
}
