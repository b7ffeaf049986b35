package job

import (
	"github.com/spf13/cobra"

	"ulysses/internal/status"
)

// verb is one action of the program.
type verb struct {
	name   string
	words  []string // required words after the verb
	option string   // an optional word after them
	rest   string   // the words after --
	// rest may be left out
	restOptional bool
	short        string // the verb's line in ulysses-mpi --help
	long         string
	example      string
	codes        []status.Code // exit codes of this verb, besides InvalidArgument, which every verb has
	run          func(o Options) error
}

const jobFile = "job file"

var verbs []verb

func init() {
	cobra.EnableCommandSorting = false // help lists the verbs in this order
	verbs = []verb{
		{name: "run", words: []string{jobFile}, run: Run,
			short: "run the job; the word run is optional",
			long: `Runs the job: kind = "train", "eval", "attention" or "gdn". To resume a run that was stopped with
a checkpoint, run the same command again.`,
			example: `mpirun -n 4 ulysses-mpi job.toml
srun --mpi=pmix ulysses-mpi job.toml --set optimizer.lr=3e-4 --set output.dir=out2
ulysses-mpi job.toml --ranks 4`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm,
				status.Device, status.IO, status.Numeric, status.Preempted}},
		{name: "plan", words: []string{jobFile}, run: func(o Options) error {
			return onFirstRank(func() error { return planJob(o) })
		},
			short: "predict memory, traffic and time of a step; executes nothing",
			long: `Predicts the memory of each rank, the bytes sent, the time of a step, and whether the job fits.
It executes nothing. It needs no GPU, except for device.backend = "cuda" without --cluster.
docs/plan.md explains the tables.`,
			example: `ulysses-mpi plan job.toml --ranks 8
ulysses-mpi plan job.toml --cluster examples/clusters/h200.toml --search`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Device,
				status.IO}},
		{name: "verify", words: []string{jobFile}, run: Verify,
			short: "compare the job on one rank with the job on all ranks, tensor by tensor",
			long: `Runs the first step of the job (or the whole operator job) on all ranks and on one rank, and
compares loss, gradients and outputs. The first line is the verdict: bitwise, within tolerance, or
FAIL with the tensors that differ by more than the tolerance. With --tensors, a file gets the
tensors of all ranks, so that another program can compare them.`,
			example: `mpirun -n 4 ulysses-mpi verify job.toml
ulysses-mpi verify job.toml --ranks 4 --all
ulysses-mpi verify job.toml --tensors step1.safetensors`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm,
				status.Device, status.IO, status.Numeric}},
		{name: "eval", words: []string{jobFile}, option: "folder", run: Eval,
			short: "evaluate a checkpoint or a model folder with the data of a job",
			long: `Evaluates the weights of a checkpoint, of the newest checkpoint in a folder, of adapters (a folder
of PEFT) or of a Hugging Face folder on the evaluation data of a job file, whatever its kind.
Without a folder, it takes the newest checkpoint of the job. Any number of ranks may evaluate.
Results are written as by a job of kind = "eval"; while the run goes on, set another output.dir.`,
			example: `ulysses-mpi eval job.toml out/checkpoints/step-00001000
mpirun -n 4 ulysses-mpi eval job.toml out --set output.dir=out/eval --set eval.path=other.jsonl`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm,
				status.Device, status.IO, status.Numeric}},
		{name: "logits", words: []string{jobFile}, option: "folder", run: Logits,
			short: "write the loss of each token of an evaluation, and compare two folders",
			long: `Evaluates as the verb eval does, and with --tensors writes the loss of each token to a file, with
--logits also its logits. --compare evaluates another folder on the same tokens and prints the
differences. It writes nothing into output.dir.`,
			example: `ulysses-mpi logits job.toml out/model --tensors losses.safetensors
ulysses-mpi logits job.toml out/checkpoints --compare Qwen3-0.6B --ranks 2`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm,
				status.Device, status.IO, status.Numeric}},
		{name: "supervise", words: []string{jobFile}, rest: "launcher", run: superviseJob,
			short: "run the job under a launcher, end it if it hangs, and start it again after a fault",
			long: `Starts the launcher, with its options, and the job. If no rank shows a sign of life for
parallel.timeout, it ends the job. With --restarts N, a job one of whose ranks has died
or failed starts again from its newest checkpoint, N times at most: under srun on nodes of the
allocation that respond, with a spare node instead of a dead one if there is one, and otherwise on
fewer nodes with a mesh that the program chooses. SIGTERM, SIGINT, SIGHUP and SIGUSR1 stop the job
with a checkpoint; SIGQUIT, or a second SIGTERM, SIGINT or SIGHUP, ends it at once. The exit code is
that of the job.`,
			example: `ulysses-mpi supervise job.toml --restarts 3 -- srun -N 4 --ntasks-per-node=8 --mpi=pmix
ulysses-mpi supervise job.toml --restarts 1 -- mpirun -n 8`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm,
				status.Device, status.IO, status.Numeric, status.Preempted}},
		{name: "sbatch", words: []string{jobFile}, rest: "options of sbatch", restOptional: true,
			run:   func(o Options) error { return onFirstRank(func() error { return sbatch(o) }) },
			short: "print a batch script for Slurm",
			long: `Prints a batch script that runs the job under Slurm: with SIGUSR1 before the time limit, requeue
after a stop with a checkpoint, an end of the job as soon as a rank dies, and with --restarts a
restart on the nodes that are left. --array runs the job once for each index; --set may have
$SLURM_ARRAY_TASK_ID, and output.dir gets the index if --set does not give it. Words after -- become
#SBATCH lines.`,
			example: `ulysses-mpi sbatch job.toml --nodes 4 --gpus-per-node 8 --time 12:00:00 -o train.sbatch
ulysses-mpi sbatch job.toml --nodes 1 --ntasks-per-node 16 --time 1:00:00 -- --partition=cpu --account=me
ulysses-mpi sbatch job.toml --time 1:00:00 --array 0-3 --set 'seed=$SLURM_ARRAY_TASK_ID'`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.IO}},
		{name: "export", words: []string{"checkpoint", "folder"}, run: func(o Options) error {
			return onFirstRank(func() error { return export(o) })
		},
			short: "write a Hugging Face folder from a checkpoint, or from the newest of several",
			long: `Writes the weights of a checkpoint as a Hugging Face folder, as at the end of a run.
The checkpoint is a folder step-NNNNNNNN, or a folder of several or the output.dir of a run, of
which the newest is read.
Adapters (LoRA) are written as a folder of PEFT, or with --merge as a whole model. With --merge, a
folder of PEFT can stand for the checkpoint.
A folder that has a model is not overwritten without --force; the base model's folder never is.
It needs no other ranks and no GPU.`,
			example: `ulysses-mpi export out/checkpoints model-of-checkpoint`,
			codes:   []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.IO, status.Numeric}},
		{name: "generate", words: []string{"model-folder"}, option: "prompt", run: generateText,
			short: "continue a text with a model",
			long: `Continues the prompt, or the text of standard input, with the model of a Hugging Face folder, such
as the folder model of output.dir. It takes the most probable token, or draws one if --temperature
is above 0. If the folder has a generation_config.json with do_sample, its values are the defaults;
fields such as repetition_penalty have no effect and are named in a warning. The text ends after
--max-tokens, or with a token that ends a text. Special tokens in the prompt are recognized. It
begins with the marks with which the tokenizer begins a text. With --chat, the model answers the
prompt as the user of its chat template; a prompt in JSON with messages, as in a .jsonl file, is a
whole conversation, also with tools and chat_template_kwargs. Several ranks divide the layers: each
has the weights and caches of its layers, so a model may be larger than the memory of one rank. The
text is the same on any number of ranks.`,
			example: `ulysses-mpi generate out/model "The whale"
ulysses-mpi generate Qwen3-0.6B --temperature 0.7 --top-p 0.8 < prompt.txt
ulysses-mpi generate Qwen3-0.6B --chat "Why is the sky blue?"
mpirun -n 4 ulysses-mpi generate Llama-3.1-70B "The whale"`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm,
				status.Device, status.IO, status.Numeric}},
		{name: "init", option: "model-folder", run: func(o Options) error {
			return onFirstRank(func() error { return initJob(o) })
		},
			short: "write a commented job file, for a model folder or from scratch",
			long: `Writes a job file with comments. With a Hugging Face folder, the job fine-tunes this model;
without a folder, it trains a small model from scratch. A file that exists is not overwritten.`,
			example: `ulysses-mpi init Qwen3-0.6B -o finetune.toml
ulysses-mpi init`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.IO}},
		{name: "doctor", run: doctorVerb,
			short: "list what was found on this machine and what is missing; check all nodes",
			long: `Lists processor, memory, MPI, GPUs and libraries of this machine. For each missing one it
prints the consequence and the fix. With --cluster, under the launcher of the job, it checks all
ranks instead: whether the nodes have the same program, plug-in, kernels, job file, model and data,
share output.dir, and have the same time, and whether a device or a link is slow. The exit code is
then that of the first finding.`,
			example: `srun -N 1 -n 1 ulysses-mpi doctor
srun -N 4 --ntasks-per-node=8 --mpi=pmix ulysses-mpi doctor --cluster job.toml`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm,
				status.Device, status.IO}},
		{name: "diagnose", words: []string{"folder"}, run: func(o Options) error {
			return onFirstRank(func() error { return diagnose(o) })
		},
			short: "name the ranks that kept the others waiting, from the records of a run that hung",
			long: `Compares the last operations of all ranks of a training run that hung or failed. Each rank leaves
them in the folder flight of output.dir. It prints what each rank did, and names the rank that is
late, gone, or in another operation than the others. It needs no other ranks and no GPU.`,
			example: `ulysses-mpi diagnose out/flight
ulysses-mpi diagnose out/flight/previous --json`,
			codes: []status.Code{status.OK, status.IO}},
		{name: "completion", words: []string{"shell"}, run: func(o Options) error {
			return onFirstRank(func() error { return completion(o) })
		},
			short: "print the completion script of bash, zsh, fish or powershell",
			long: `Prints a script with which a shell completes verbs, flags, job files and the keys of --set.
Load it in the shell's start file, or write it to the shell's folder of completion scripts.`,
			example: `source <(ulysses-mpi completion bash)
ulysses-mpi completion bash > /etc/bash_completion.d/ulysses-mpi
ulysses-mpi completion zsh > "${fpath[1]}/_ulysses-mpi"
ulysses-mpi completion fish > ~/.config/fish/completions/ulysses-mpi.fish`,
			codes: []status.Code{status.OK, status.IO}},
		{name: "version", run: func(o Options) error { return onFirstRank(func() error { return version(o.Stdout) }) },
			short: "print version, commit and build",
			long: `Prints the version, the commit of the sources, whether the program is linked with MPI, and the
version of Go.`,
			example: "ulysses-mpi version", codes: []status.Code{status.OK, status.IO}},
	}
}

// verbOf returns the verb with a name, or nil.
func verbOf(name string) *verb {
	for i := range verbs {
		if verbs[i].name == name {
			return &verbs[i]
		}
	}
	return nil
}

func verbNames() []string {
	var names []string
	for _, v := range verbs {
		names = append(names, v.name)
	}
	return names
}
