package job

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"ulysses/internal/status"
	"ulysses/job/file"
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
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm, status.Device, status.IO, status.Numeric, status.Preempted}},
		{name: "plan", words: []string{jobFile}, run: func(o Options) error { return onFirstRank(func() error { return planJob(o) }) },
			short: "predict memory, traffic and time of a step; executes nothing",
			long: `Predicts the memory of each rank, the bytes sent, the time of a step, and whether the job fits.
It executes nothing. It needs no GPU, except for device.backend = "cuda" without --cluster.
docs/plan.md explains the tables.`,
			example: `ulysses-mpi plan job.toml --ranks 8
ulysses-mpi plan job.toml --cluster examples/clusters/h200.toml --search`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Device, status.IO}},
		{name: "verify", words: []string{jobFile}, run: Verify,
			short: "compare the job on one rank with the job on all ranks, tensor by tensor",
			long: `Runs the first step of the job (or the whole operator job) on all ranks and on one rank, and
compares loss, gradients and outputs. The first line is the verdict: bitwise, within tolerance, or
FAIL with the tensors that differ by more than the tolerance. With --tensors, a file gets the
tensors of all ranks, so that another program can compare them.`,
			example: `mpirun -n 4 ulysses-mpi verify job.toml
ulysses-mpi verify job.toml --ranks 4 --all
ulysses-mpi verify job.toml --tensors step1.safetensors`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm, status.Device, status.IO, status.Numeric}},
		{name: "eval", words: []string{jobFile}, option: "folder", run: Eval,
			short: "evaluate a checkpoint or a model folder with the data of a job",
			long: `Evaluates the weights of a checkpoint, of the newest checkpoint in a folder, of adapters (a folder
of PEFT) or of a Hugging Face folder on the evaluation data of a job file, whatever its kind.
Without a folder, it takes the newest checkpoint of the job. Any number of ranks may evaluate.
Results are written as by a job of kind = "eval"; while the run goes on, set another output.dir.`,
			example: `ulysses-mpi eval job.toml out/checkpoints/step-00001000
mpirun -n 4 ulysses-mpi eval job.toml out --set output.dir=out/eval --set eval.path=other.jsonl`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm, status.Device, status.IO, status.Numeric}},
		{name: "logits", words: []string{jobFile}, option: "folder", run: Logits,
			short: "write the loss of each token of an evaluation, and compare two folders",
			long: `Evaluates as the verb eval does, and with --tensors writes the loss of each token to a file, with
--logits also its logits. --compare evaluates another folder on the same tokens and prints the
differences. It writes nothing into output.dir.`,
			example: `ulysses-mpi logits job.toml out/model --tensors losses.safetensors
ulysses-mpi logits job.toml out/checkpoints --compare Qwen3-0.6B --ranks 2`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm, status.Device, status.IO, status.Numeric}},
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
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm, status.Device, status.IO, status.Numeric, status.Preempted}},
		{name: "sbatch", words: []string{jobFile}, rest: "options of sbatch", restOptional: true, run: func(o Options) error { return onFirstRank(func() error { return sbatch(o) }) },
			short: "print a batch script for Slurm",
			long: `Prints a batch script that runs the job under Slurm: with SIGUSR1 before the time limit, requeue
after a stop with a checkpoint, an end of the job as soon as a rank dies, and with --restarts a
restart on the nodes that are left. --array runs the job once for each index; --set may have
$SLURM_ARRAY_TASK_ID, and output.dir gets the index if --set does not give it. Words after -- become
#SBATCH lines.`,
			example: `ulysses-mpi sbatch job.toml --nodes 4 --gpus-per-node 8 --time 12:00:00 -o train.sbatch
ulysses-mpi sbatch job.toml --nodes 1 --ntasks-per-node 16 --time 1:00:00 -- --partition=cpu --account=me
ulysses-mpi sbatch job.toml --time 1:00:00 --array 0-3 --set 'seed=$SLURM_ARRAY_TASK_ID'`,
			codes: []status.Code{status.OK, status.InvalidConfig, status.IO}},
		{name: "export", words: []string{"checkpoint", "folder"}, run: func(o Options) error { return onFirstRank(func() error { return export(o) }) },
			short: "write a Hugging Face folder from a checkpoint, or from the newest of several",
			long: `Writes the weights of a checkpoint as a Hugging Face folder, as at the end of a run.
The checkpoint is a folder step-NNNNNNNN, or a folder of several or the output.dir of a run, of
which the newest is read.
Adapters (LoRA) are written as a folder of PEFT, or with --merge as a whole model. With --merge, a
folder of PEFT can stand for the checkpoint.
A folder that has a model is not overwritten without --force; the base model's folder never is.
It needs no other ranks and no GPU.`,
			example: `ulysses-mpi export out/checkpoints model-of-checkpoint`,
			codes:   []status.Code{status.OK, status.InvalidConfig, status.IO}},
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
			codes: []status.Code{status.OK, status.InvalidConfig, status.Unsupported, status.OutOfMemory, status.Comm, status.Device, status.IO}},
		{name: "init", option: "model-folder", run: func(o Options) error { return onFirstRank(func() error { return initJob(o) }) },
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
			codes: []status.Code{status.OK, status.InvalidConfig, status.OutOfMemory, status.Comm, status.Device, status.IO}},
		{name: "diagnose", words: []string{"folder"}, run: func(o Options) error { return onFirstRank(func() error { return diagnose(o) }) },
			short: "name the ranks that kept the others waiting, from the records of a run that hung",
			long: `Compares the last operations of all ranks of a training run that hung or failed. Each rank leaves
them in the folder flight of output.dir. It prints what each rank did, and names the rank that is
late, gone, or in another operation than the others. It needs no other ranks and no GPU.`,
			example: `ulysses-mpi diagnose out/flight
ulysses-mpi diagnose out/flight/previous --json`,
			codes: []status.Code{status.OK, status.IO}},
		{name: "completion", words: []string{"shell"}, run: func(o Options) error { return onFirstRank(func() error { return completion(o) }) },
			short: "print the completion script of bash, zsh, fish or powershell",
			long: `Prints a script with which a shell completes verbs, flags, job files and the keys of --set.
Load it in the shell's start file, or write it to the shell's folder of completion scripts.`,
			example: `source <(ulysses-mpi completion bash)
ulysses-mpi completion bash > /etc/bash_completion.d/ulysses-mpi
ulysses-mpi completion zsh > "${fpath[1]}/_ulysses-mpi"
ulysses-mpi completion fish > ~/.config/fish/completions/ulysses-mpi.fish`,
			codes: []status.Code{status.OK}},
		{name: "version", run: func(o Options) error { return onFirstRank(func() error { return version(o.Stdout) }) },
			short: "print version, commit and build",
			long: `Prints the version, the commit of the sources, whether the program is linked with MPI, and the
version of Go.`,
			example: "ulysses-mpi version", codes: []status.Code{status.OK}},
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

// flagVerbs maps a flag to the verbs that accept it. Every command defines every flag, so that a
// flag may be in front of the verb, and a flag of another verb is refused by name.
var flagVerbs = map[string][]string{
	"set": {"run", "plan", "verify", "eval", "logits", "supervise", "sbatch", "doctor"}, "restarts": {"supervise", "sbatch"}, "ranks": {"run", "plan", "verify", "eval", "logits", "generate", "doctor"}, "search": {"plan"}, "cluster": {"plan", "doctor"}, "json": {"verify", "diagnose", "logits"}, "compare": {"logits"}, "logits": {"logits"}, "all": {"verify"}, "tensors": {"verify", "logits"}, "force": {"run", "export", "supervise"}, "merge": {"export"},
	"log": {"run", "plan", "verify", "eval", "logits", "supervise"}, "verbose": {"run", "eval", "supervise"}, "quiet": {"run", "verify", "eval", "logits", "supervise", "generate"},
	"chat": {"generate"}, "max-tokens": {"generate"}, "temperature": {"generate"}, "top-p": {"generate"}, "top-k": {"generate"}, "seed": {"generate"}, "device": {"generate"}, "dtype": {"generate"}, "output": {"init", "sbatch"},
	"nodes": {"sbatch"}, "ntasks-per-node": {"sbatch"}, "gpus-per-node": {"sbatch"}, "cpus-per-task": {"sbatch"}, "time": {"sbatch"}, "array": {"sbatch"}, "image": {"sbatch"},
}

// addFlags defines all flags of all verbs.
func addFlags(f *pflag.FlagSet, o *Options) {
	f.Var((*setFlag)(&o.Sets), "set", "replace a key of the job file; the value is TOML or text; may be repeated")
	f.IntVarP(&o.Ranks, "ranks", "n", 0, "run `N` ranks inside this process (default 1)")
	f.BoolVar(&o.search, "search", false, "find the best mesh for these ranks and the longest sequence that fits")
	f.StringVar(&o.cluster, "cluster", "", "plan for the machine that `file.toml` describes (docs/plan.md)")
	f.BoolVar(&o.json, "json", false, "print the findings as one JSON object")
	f.BoolVar(&o.all, "all", false, "print every tensor")
	f.StringVar(&o.tensors, "tensors", "", "write the tensors of all ranks to `file.safetensors`, with the loss of each token")
	f.StringVar(&o.compare, "compare", "", "compare with the weights in another `folder`")
	f.BoolVar(&o.logits, "logits", false, "write or compare also the logits of each token")
	f.BoolVar(&o.merge, "merge", false, "add the adapters to the base model, and write the whole model")
	f.BoolVar(&o.force, "force", false, "overwrite results of another run or an older model (output.overwrite)")
	f.IntVar(&o.restarts, "restarts", 0, "start the job again `N` times at most")
	f.IntVar(&o.sbatch.nodes, "nodes", 1, "`N` nodes")
	f.IntVar(&o.sbatch.tasks, "ntasks-per-node", 0, "`N` ranks a node (default: one for each GPU, or 1)")
	f.IntVar(&o.sbatch.gpus, "gpus-per-node", 0, "`N` GPUs a node")
	f.IntVar(&o.sbatch.cpus, "cpus-per-task", 0, "`N` cores a rank (default: Slurm's)")
	f.StringVar(&o.sbatch.time, "time", "1:00:00", "time `limit`, in a form of Slurm")
	f.StringVar(&o.sbatch.array, "array", "", "run the job for each `index` of a list such as 0-3")
	f.StringVar(&o.sbatch.image, "image", "", "run the program of an Apptainer image `file.sif`")
	f.BoolVar(&o.generate.chat, "chat", false, "the prompt is what a user says; the model's chat template is put around it")
	f.Int64Var(&o.generate.tokens, "max-tokens", 0, "generate `N` tokens at most (default: 128, or as many as the model has positions for)")
	f.Float64Var(&o.generate.temperature, "temperature", -1, "divide the logits by `T` and draw a token; 0 = the most probable token (default: the model's, or 0)")
	f.Float64Var(&o.generate.topP, "top-p", -1, "draw among the most probable tokens with a sum of `P` (default: the model's, or 1)")
	f.Int64Var(&o.generate.topK, "top-k", -1, "draw among the `K` most probable tokens; 0 = all (default: the model's, or 0)")
	f.Int64Var(&o.generate.seed, "seed", 1, "`seed` of the draws")
	f.StringVar(&o.generate.device, "device", "auto", "`device`: auto, cpu or cuda")
	for _, name := range []string{"temperature", "top-p", "top-k"} {
		f.Lookup(name).DefValue = "0" // help does not print the -1 that stands for the model's value
	}
	f.StringVar(&o.generate.dtype, "dtype", "auto", "compute `type`: auto, f32 or bf16")
	f.StringVarP(&o.output, "output", "o", "job.toml", "write `file.toml`")
	f.StringVar(&o.log, "log", "auto", "`form` of the log: auto (= console), console (text) or json")
	f.BoolVarP(&o.Verbose, "verbose", "v", false, "print all tables: memory by component, every phase, bytes by operation")
	f.BoolVarP(&o.Quiet, "quiet", "q", false, "print warnings, errors and one line of results")
}

// setFlag collects --set arguments unchanged; a value may contain commas.
type setFlag []string

func (s *setFlag) String() string { return "" }
func (s *setFlag) Type() string   { return "table.key=value" }
func (s *setFlag) Set(text string) error {
	if name, _, ok := strings.Cut(text, "="); !ok || strings.TrimSpace(name) == "" {
		return errors.New("not table.key=value; write for example optimizer.lr=1e-4")
	}
	*s = append(*s, text)
	return nil
}

// parseArgs reads flags before and after the verb and the job file. If the verb is "", the program
// prints only o.text: a help text, the version or shell completions.
func parseArgs(args []string) (chosen string, o Options, err error) {
	var text strings.Builder
	var misuse error
	root := newCommands(&o, func(v *verb, cmd *cobra.Command, words []string) { chosen, misuse = v.name, o.choose(v, cmd, words) })
	root.SetArgs(doubleDashes(root, args))
	root.SetOut(&text)
	root.SetErr(io.Discard)
	if err = root.Execute(); err == nil {
		err = misuse
	}
	if err != nil {
		return "", o, status.Errorf(status.InvalidArgument, "%s; see ulysses-mpi --help", flagFault(root, err))
	}
	o.text = text.String()
	return chosen, o, nil
}

// newCommands returns the tree of commands: the root, which is run, and one command for each verb.
func newCommands(o *Options, choose func(v *verb, cmd *cobra.Command, words []string)) *cobra.Command {
	command := func(v *verb, use string) *cobra.Command {
		cmd := &cobra.Command{Use: use, Short: v.short, Long: v.long, Example: v.example, Args: cobra.ArbitraryArgs, DisableFlagsInUseLine: true,
			Run: func(cmd *cobra.Command, words []string) { choose(v, cmd, words) }, ValidArgsFunction: completeWords(v)}
		cmd.Flags().SortFlags = false
		addFlags(cmd.Flags(), o)
		cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Hidden = !slices.Contains(flagVerbs[f.Name], v.name) })
		switch v.name {
		case "plan":
			cmd.Flags().Lookup("ranks").Usage = "plan for `N` ranks (default: of the launcher or the cluster, else parallel.ulysses x parallel.ring)"
		case "doctor":
			cmd.Flags().Lookup("cluster").Usage = "check all ranks of the job `job.toml`, under its launcher"
		case "sbatch":
			output := cmd.Flags().Lookup("output")
			output.Usage, output.DefValue = "write the script to `file` instead of standard output", ""
		}
		completeFlags(cmd)
		cmd.InitDefaultHelpFlag()
		cmd.Flags().Lookup("help").Usage = "print this text"
		return cmd
	}
	root := command(verbOf("run"), "ulysses-mpi")
	root.SilenceErrors, root.SilenceUsage, root.Version = true, true, programVersion()
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) { writeHelp(cmd.OutOrStdout(), cmd) })
	root.InitDefaultVersionFlag()
	root.Flags().Lookup("version").Usage = "print version, commit and build"
	for i := range verbs {
		root.AddCommand(command(&verbs[i], verbs[i].use()))
	}
	root.CompletionOptions.DisableDefaultCmd = true // completion is a verb like the others
	root.InitDefaultHelpCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() == "help" {
			cmd.Use, cmd.Short, cmd.Long = "help [verb]", "print the help text of a verb", "Prints the help text of a verb, or of the program."
			cmd.DisableFlagsInUseLine = true
			cmd.InitDefaultHelpFlag()
			cmd.Flags().Lookup("help").Usage = "print this text"
			cmd.RunE = func(_ *cobra.Command, words []string) error {
				about, rest, err := root.Find(words)
				if err != nil || len(rest) > 0 {
					return fmt.Errorf("help %s: unknown verb", strings.Join(words, " "))
				}
				return about.Help()
			}
		}
	}
	return root
}

// use returns the verb with its words, for the usage line.
func (v *verb) use() string {
	text := v.name
	for _, w := range v.words {
		if w == jobFile {
			w = "job.toml"
		}
		text += " " + w
	}
	if v.option != "" {
		text += " [" + v.option + "]"
	}
	if v.rest != "" {
		if v.restOptional {
			text += " [-- " + v.rest + "]"
		} else {
			text += " -- " + v.rest
		}
	}
	return text
}

// choose checks flags and words against the verb and stores them.
func (o *Options) choose(v *verb, cmd *cobra.Command, words []string) error {
	if err := v.refuseFlags(cmd.Flags()); err != nil {
		return err
	}
	if at := cmd.ArgsLenAtDash(); v.rest != "" && at >= 0 {
		o.launcher, words = words[at:], words[:at]
	}
	most := maxRanks
	if v.name == "plan" {
		most = file.MaxPlanned
	}
	switch want := v.words; {
	case cmd.Flags().Changed("ranks") && (o.Ranks < 1 || o.Ranks > most):
		return fmt.Errorf("--ranks %d: not a number of ranks; set 1 to %d", o.Ranks, most)
	case o.Quiet && o.Verbose:
		return errors.New("--quiet and --verbose: contradictory; remove one")
	case !slices.Contains(logForms, o.log):
		return fmt.Errorf("--log %s: unknown form; use %s", o.log, strings.Join(logForms, ", "))
	case cmd.Flags().Changed("cluster") && o.cluster == "":
		return errors.New(v.name + ": --cluster: empty; name a file")
	case v.name == "doctor" && o.cluster == "" && (o.Ranks > 0 || len(o.Sets) > 0):
		return errors.New("doctor: --ranks and --set are for the ranks of a job; add --cluster job.toml")
	case len(words) == 0 && !cmd.HasParent():
		return errors.New("no job file and no verb; name a job file")
	case len(want) == 0 && v.option == "" && len(words) > 0:
		return fmt.Errorf("%s %s: %[1]s has no arguments; remove it", v.name, words[0])
	case len(words) < len(want):
		return fmt.Errorf("%s: %s is missing; name one", v.name, want[len(words)])
	case cmd.Flags().Changed("tensors") && o.tensors == "":
		return errors.New(v.name + ": --tensors: empty; name a file")
	case cmd.Flags().Changed("compare") && o.compare == "":
		return errors.New(v.name + ": --compare: empty; name a folder")
	case cmd.Flags().Changed("output") && o.output == "":
		return errors.New(v.name + ": --output: empty; name a file")
	case v.rest != "" && !v.restOptional && len(o.launcher) == 0:
		return fmt.Errorf("%s: the %s is missing; end the command with, for example, -- srun -N 2 --mpi=pmix", v.name, v.rest)
	case o.restarts < 0:
		return fmt.Errorf("--restarts %d: negative; set 0 or more", o.restarts)
	case v.option != "" && len(words) > len(want)+1:
		given := words[len(want):]
		return fmt.Errorf("%s: there are %[3]d %[2]ss: %[4]s; name one", v.name, v.option, len(given), strings.Join(given, ", "))
	case v.option == "" && len(words) > len(want):
		return v.tooMany(words)
	case v.name == "generate":
		if err := o.generate.check(cmd.Flags()); err != nil {
			return err
		}
	}
	o.words, o.outputSet = words, cmd.Flags().Changed("output")
	if slices.Contains(v.words, jobFile) {
		o.Path = words[0]
	}
	if cmd.HasParent() || !bareWord.MatchString(o.Path) {
		return nil
	}
	if near := file.Nearest(o.Path, verbNames()); near != "" {
		if _, err := os.Stat(o.Path); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: neither a verb nor a job file; did you mean %s?", o.Path, near)
		}
	}
	return nil
}

// refuseFlags refuses flags that belong to other verbs.
func (v *verb) refuseFlags(given *pflag.FlagSet) (err error) {
	given.Visit(func(f *pflag.Flag) {
		switch of := flagVerbs[f.Name]; {
		case err != nil || slices.Contains(of, v.name):
		case !v.hasFlags():
			err = fmt.Errorf("%s: this verb has no flags; remove them", v.name)
		default:
			err = fmt.Errorf("%s: --%s is a flag of %s; remove it", v.name, f.Name, strings.Join(of, ", "))
		}
	})
	return err
}

func (v *verb) hasFlags() bool {
	for _, of := range flagVerbs {
		if slices.Contains(of, v.name) {
			return true
		}
	}
	return false
}

// tooMany returns the error for more words than the verb takes.
func (v *verb) tooMany(words []string) error {
	if verbOf(words[1]) != nil {
		return fmt.Errorf("%s %s: the verb must come first", words[0], words[1])
	}
	if len(v.words) > 1 {
		return fmt.Errorf("%s: there are %[3]d arguments: %[4]s; name a %[2]s", v.name, strings.Join(v.words, " and a "), len(words), strings.Join(words, ", "))
	}
	if near := file.Nearest(words[0], verbNames()); near != "" {
		return fmt.Errorf("%s: unknown verb; did you mean %s?", words[0], near)
	}
	if v.name == "run" && bareWord.MatchString(words[0]) {
		return fmt.Errorf("%s: unknown verb; a job file is run without a verb: ulysses-mpi %s", words[0], words[1])
	}
	return fmt.Errorf("%s: there are %[3]d %[2]ss: %[4]s; name one", v.name, v.words[0], len(words), strings.Join(words, ", "))
}

func verbNames() []string {
	var names []string
	for _, v := range verbs {
		names = append(names, v.name)
	}
	return names
}

var bareWord = regexp.MustCompile(`^[a-z]+$`)

var singleDash = regexp.MustCompile(`^-([a-z]{2,})(=.*)?$`)

// doubleDashes accepts -ranks for --ranks.
func doubleDashes(root *cobra.Command, args []string) []string {
	out := slices.Clone(args)
	for i, a := range out {
		if a == "--" {
			break
		}
		if m := singleDash.FindStringSubmatch(a); m != nil && root.Flags().Lookup(m[1]) != nil {
			out[i] = "-" + a
		}
	}
	return append([]string{}, out...) // not nil: cobra reads os.Args if the arguments are nil
}

// flagFault returns the error for a wrong flag. All verbs have the flags of root.
func flagFault(root *cobra.Command, err error) string {
	var unknown *pflag.NotExistError
	var bare *pflag.ValueRequiredError
	var bad *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		if unknown.GetSpecifiedShortnames() != "" {
			return "unknown flag -" + unknown.GetSpecifiedName()
		}
		var names []string
		root.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		text := "unknown flag --" + unknown.GetSpecifiedName()
		if near := file.Nearest(unknown.GetSpecifiedName(), names); near != "" {
			text += "; did you mean --" + near + "?"
		}
		return text
	case errors.As(err, &bare):
		return "flag needs an argument: --" + bare.GetFlag().Name
	case errors.As(err, &bad):
		why := bad.Unwrap().Error()
		if n := (*strconv.NumError)(nil); errors.As(err, &n) {
			why = map[string]string{"ParseInt": "a whole number is needed", "ParseFloat": "a number is needed", "ParseBool": "true or false is needed"}[n.Func]
		}
		return fmt.Sprintf("invalid value %q for --%s: %s", bad.GetValue(), bad.GetFlag().Name, why)
	}
	return err.Error()
}
