package job

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/job/launch"
	"ulysses/job/supervise"
	"ulysses/slurm"
	"ulysses/train"
)

// superviseJob is the verb supervise. o.launcher is the launcher with its options.
func superviseJob(o Options) error {
	if env := slurm.Env(); env.Tasks > 1 && !launch.LeftOver(env) {
		return status.Errorf(status.InvalidArgument,
			"supervise: %s has started %d tasks, and each would start the job; start one supervisor, which starts the launcher: ulysses-mpi supervise %s -- %s",
			env.Launcher, env.Tasks, o.Path, strings.Join(o.launcher, " "))
	}
	src, err := file.Read(o.Path)
	if err != nil {
		return err
	}
	if o.force {
		o.Sets = append(o.Sets, "output.overwrite=true")
	}
	j, err := file.Parse(src, o.Path, o.Sets, os.LookupEnv)
	if err != nil {
		return err
	}
	if j.Kind != "train" {
		return j.Errorf(status.InvalidConfig, "kind",
			"%q: only training has checkpoints from which it can start again; run it without supervise", j.Kind)
	}
	limit, err := launch.Timeout(j.Parallel.Timeout)
	if err != nil {
		return err
	}
	switch name := filepath.Base(o.launcher[0]); name {
	case "sbatch", "qsub", "bsub":
		return status.Errorf(status.InvalidArgument,
			"supervise: %s only submits a job, and ends before it runs; start the supervisor in the script that %s gets, with a launcher such as srun or mpirun",
			name, name)
	}
	log := o.rootLog()
	caught := make(chan os.Signal, 8)
	for _, s := range launch.Caught() {
		signal.Notify(caught, s)
	}
	defer signal.Stop(caught)
	// If the reader of the output exits, the job continues. An ignored signal would stay ignored in
	// the launcher.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	code, err := supervise.Run(supervise.Options{Launcher: o.launcher, Program: o.rankCommand(),
		Records: filepath.Join(j.Output.Dir, flightFolder), Restarts: o.restarts, Again: restarts(j),
		Fewer: onFewer(j), Timeout: limit,
		Stdout: o.Stdout, Stderr: o.Stderr, Signals: caught,
		Log: func(text string) { log.Warn().Msg("supervise: " + text) }})
	if err != nil || code == 0 {
		return err
	}
	return endedWith(code)
}

// restarts returns the function supervise.Options.Again of a job that has not started yet. With
// another checkpoint.resume than "auto", only the first start is to begin afresh or from a certain
// checkpoint. Restarts resume from the checkpoints that the job itself has written, which have
// removed all others.
func restarts(j *file.Job) func() (from string, options []string) {
	before, written := train.Newest(j.CheckpointDir())
	return func() (string, []string) {
		now, when := train.Newest(j.CheckpointDir())
		resume := j.Checkpoint.Resume
		switch {
		case now == "":
			return "the beginning", nil
		case resume == "auto":
			return "the newest checkpoint", nil
		case now != before || !when.Equal(written):
			return "the newest checkpoint", []string{"--set", "checkpoint.resume=auto"}
		}
		return fmt.Sprintf("where it began (checkpoint.resume = %q), because it has written no checkpoint", resume), nil
	}
}

// onFewer returns the function supervise.Options.Fewer of a job: the program chooses the mesh. A
// step keeps the number of sequences that it has with the mesh of the job, which has as many
// replicas as its ranks allow: a checkpoint of another number is refused. Experts are divided among
// fewer ranks if the number that the job names does not divide the ranks, which changes no result.
func onFewer(j *file.Job) func(before, now int) []string {
	return func(before, now int) []string {
		options := []string{"--set", "parallel.ulysses=0", "--set", "parallel.ring=0"}
		whole := *j
		if before < 1 || whole.Resolve(before) != nil {
			return options
		}
		if n := whole.Mesh.GlobalBatch; n != j.SequencesOfStep() {
			options = append(options, "--set", fmt.Sprintf("data.global_batch=%d", n))
		}
		if n := j.Parallel.Experts; n > 1 && int64(now)%n != 0 {
			options = append(options, "--set", fmt.Sprintf("parallel.experts=%d", commonDivisor(n, int64(now))))
		}
		return options
	}
}

// commonDivisor returns the greatest common divisor.
func commonDivisor(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// rankCommand returns the command of a rank of the same job.
func (o *Options) rankCommand() []string {
	program := os.Args[0]
	if path, err := os.Executable(); err == nil {
		program = path
	}
	words := []string{program, "run", o.Path}
	for _, set := range o.Sets {
		words = append(words, "--set", set)
	}
	if o.log != "" {
		words = append(words, "--log", o.log)
	}
	if o.Verbose {
		words = append(words, "--verbose")
	}
	if o.Quiet {
		words = append(words, "--quiet")
	}
	return words
}

// endedWith is the exit code of a program that has printed its own error.
type endedWith int

func (e endedWith) Error() string { return "exit code " + strconv.Itoa(int(e)) }
