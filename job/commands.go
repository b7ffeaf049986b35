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

// flagVerbs maps a flag to the verbs that accept it. Every command defines every flag, so that a
// flag may be in front of the verb, and a flag of another verb is refused by name.
var flagVerbs = map[string][]string{
	"set":             {"run", "plan", "verify", "eval", "logits", "supervise", "sbatch", "doctor"},
	"restarts":        {"supervise", "sbatch"},
	"ranks":           {"run", "plan", "verify", "eval", "logits", "generate", "doctor"},
	"search":          {"plan"},
	"cluster":         {"plan", "doctor"},
	"json":            {"verify", "diagnose", "logits"},
	"compare":         {"logits"},
	"logits":          {"logits"},
	"all":             {"verify"},
	"tensors":         {"verify", "logits"},
	"force":           {"run", "export", "supervise"},
	"merge":           {"export"},
	"log":             {"run", "plan", "verify", "eval", "logits", "supervise"},
	"verbose":         {"run", "eval", "supervise"},
	"quiet":           {"run", "verify", "eval", "logits", "supervise", "generate"},
	"chat":            {"generate"},
	"max-tokens":      {"generate"},
	"temperature":     {"generate"},
	"top-p":           {"generate"},
	"top-k":           {"generate"},
	"seed":            {"generate"},
	"device":          {"generate"},
	"dtype":           {"generate"},
	"output":          {"init", "sbatch"},
	"nodes":           {"sbatch"},
	"ntasks-per-node": {"sbatch"},
	"gpus-per-node":   {"sbatch"},
	"cpus-per-task":   {"sbatch"},
	"time":            {"sbatch"},
	"array":           {"sbatch"},
	"image":           {"sbatch"},
}

// addFlags defines all flags of all verbs.
func addFlags(f *pflag.FlagSet, o *Options) {
	f.Var((*setFlag)(&o.Sets), "set", "replace a key of the job file; the value is TOML or text; may be repeated")
	f.IntVarP(&o.Ranks, "ranks", "n", 0, "run `N` ranks inside this process (default 1)")
	f.BoolVar(&o.search, "search", false, "find the best mesh for these ranks and the longest sequence that fits")
	f.StringVar(&o.cluster, "cluster", "", "plan for the machine that `file.toml` describes (docs/plan.md)")
	f.BoolVar(&o.json, "json", false, "print the findings as one JSON object")
	f.BoolVar(&o.all, "all", false, "print every tensor")
	f.StringVar(&o.tensors, "tensors", "",
		"write the tensors of all ranks to `file.safetensors`, with the loss of each token")
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
	f.BoolVar(&o.generate.chat, "chat", false,
		"the prompt is what a user says; the model's chat template is put around it")
	f.Int64Var(&o.generate.tokens, "max-tokens", 0,
		"generate `N` tokens at most (default: 128, or as many as the model has positions for)")
	f.Float64Var(&o.generate.temperature, "temperature", -1,
		"divide the logits by `T` and draw a token; 0 = the most probable token (default: the model's, or 0)")
	f.Float64Var(&o.generate.topP, "top-p", -1,
		"draw among the most probable tokens with a sum of `P` (default: the model's, or 1)")
	f.Int64Var(&o.generate.topK, "top-k", -1,
		"draw among the `K` most probable tokens; 0 = all (default: the model's, or 0)")
	f.Int64Var(&o.generate.seed, "seed", 1, "`seed` of the draws")
	f.StringVar(&o.generate.device, "device", "auto", "`device`: auto, cpu or cuda")
	for _, name := range []string{"temperature", "top-p", "top-k"} {
		f.Lookup(name).DefValue = "0" // help does not print the -1 that stands for the model's value
	}
	f.StringVar(&o.generate.dtype, "dtype", "auto", "compute `type`: auto, f32 or bf16")
	f.StringVarP(&o.output, "output", "o", "job.toml", "write `file.toml`")
	f.StringVar(&o.log, "log", "auto", "`form` of the log: auto (= console), console (text) or json")
	f.BoolVarP(&o.Verbose, "verbose", "v", false,
		"print all tables: memory by component, every phase, bytes by operation")
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
	root := newCommands(&o, func(v *verb, cmd *cobra.Command, words []string) {
		chosen, misuse = v.name, o.choose(v, cmd, words)
	})
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
		cmd := &cobra.Command{Use: use, Short: v.short, Long: v.long, Example: v.example, Args: cobra.ArbitraryArgs,
			DisableFlagsInUseLine: true, Run: func(cmd *cobra.Command, words []string) { choose(v, cmd, words) },
			ValidArgsFunction: completeWords(v)}
		cmd.Flags().SortFlags = false
		addFlags(cmd.Flags(), o)
		cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Hidden = !slices.Contains(flagVerbs[f.Name], v.name) })
		switch v.name {
		case "plan":
			cmd.Flags().Lookup("ranks").Usage =
				"plan for `N` ranks (default: of the launcher or the cluster, else parallel.ulysses x parallel.ring)"
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
			cmd.Use, cmd.Short, cmd.Long = "help [verb]", "print the help text of a verb",
				"Prints the help text of a verb, or of the program."
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
	switch want, empty := v.words, emptyFlag(cmd.Flags()); {
	case cmd.Flags().Changed("ranks") && (o.Ranks < 1 || o.Ranks > most):
		return fmt.Errorf("--ranks %d: not a number of ranks; set 1 to %d", o.Ranks, most)
	case o.Quiet && o.Verbose:
		return errors.New("--quiet and --verbose: contradictory; remove one")
	case !slices.Contains(logForms, o.log):
		return fmt.Errorf("--log %s: unknown form; use %s", o.log, strings.Join(logForms, ", "))
	case empty != "":
		return fmt.Errorf("%s: %s", v.name, empty)
	case v.name == "doctor" && o.cluster == "" && (o.Ranks > 0 || len(o.Sets) > 0):
		return errors.New("doctor: --ranks and --set are for the ranks of a job; add --cluster job.toml")
	case len(words) == 0 && !cmd.HasParent():
		return errors.New("no job file and no verb; name a job file")
	case len(want) == 0 && v.option == "" && len(words) > 0:
		return fmt.Errorf("%s %s: %[1]s has no arguments; remove it", v.name, words[0])
	case len(words) < len(want):
		return fmt.Errorf("%s: %s is missing; name one", v.name, want[len(words)])
	case v.emptyWord(words) != "":
		return fmt.Errorf("%s: %s is empty; name one", v.name, v.emptyWord(words))
	case o.logits && o.tensors == "" && o.compare == "":
		return errors.New(v.name + ": --logits: nothing is done with them; add --tensors or --compare")
	case v.rest != "" && !v.restOptional && (len(o.launcher) == 0 || o.launcher[0] == ""):
		return fmt.Errorf("%s: the %s is missing; end the command with, for example, -- srun -N 2 --mpi=pmix",
			v.name, v.rest)
	case o.restarts < 0:
		return fmt.Errorf("--restarts %d: negative; set 0 or more", o.restarts)
	case v.option != "" && len(words) > len(want)+1:
		given := words[len(want):]
		return fmt.Errorf("%s: there are %[3]d %[2]ss: %[4]s; name one", v.name, v.option, len(given),
			strings.Join(given, ", "))
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

// emptyFlag returns the fault of a flag whose value is empty, as an unset variable of a shell is;
// "" if there is none. An empty value would stand for a flag that is not given.
func emptyFlag(f *pflag.FlagSet) (fault string) {
	remedies := map[string]string{"cluster": "name a file", "tensors": "name a file", "compare": "name a folder",
		"output": "name a file", "array": "give a list such as 0-3", "image": "name a file"}
	f.Visit(func(given *pflag.Flag) {
		if remedy := remedies[given.Name]; remedy != "" && given.Value.String() == "" {
			fault = fmt.Sprintf("--%s: empty; %s", given.Name, remedy)
		}
	})
	return fault
}

// emptyWord returns the name of a path that is empty, as an unset variable of a shell is; "" if
// there is none. An empty path would stand for the current folder, or for no path.
func (v *verb) emptyWord(words []string) string {
	for i, word := range words {
		switch {
		case word != "" || v.name == "generate" && i > 0: // a prompt may be empty
		case i < len(v.words):
			return v.words[i]
		default:
			return v.option
		}
	}
	return ""
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
		return fmt.Errorf("%s: there are %[3]d arguments: %[4]s; name a %[2]s", v.name,
			strings.Join(v.words, " and a "), len(words), strings.Join(words, ", "))
	}
	if near := file.Nearest(words[0], verbNames()); near != "" {
		return fmt.Errorf("%s: unknown verb; did you mean %s?", words[0], near)
	}
	if v.name == "run" && bareWord.MatchString(words[0]) {
		return fmt.Errorf("%s: unknown verb; a job file is run without a verb: ulysses-mpi %s", words[0], words[1])
	}
	return fmt.Errorf("%s: there are %[3]d %[2]ss: %[4]s; name one", v.name, v.words[0], len(words),
		strings.Join(words, ", "))
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

// flagFault returns the error for a wrong flag. All verbs have the flags of root, and help has none
// of them.
func flagFault(root *cobra.Command, err error) string {
	var unknown *pflag.NotExistError
	var bare *pflag.ValueRequiredError
	var bad *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		name := unknown.GetSpecifiedName()
		if root.Flags().Lookup(name) != nil || len(name) == 1 && root.Flags().ShorthandLookup(name) != nil {
			return "help: this verb has no flags; remove them"
		}
		if unknown.GetSpecifiedShortnames() != "" {
			return "unknown flag -" + name
		}
		var names []string
		root.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		text := "unknown flag --" + name
		if near := file.Nearest(name, names); near != "" {
			text += "; did you mean --" + near + "?"
		}
		return text
	case errors.As(err, &bare):
		return "flag needs an argument: --" + bare.GetFlag().Name
	case errors.As(err, &bad):
		why := bad.Unwrap().Error()
		if n := (*strconv.NumError)(nil); errors.As(err, &n) {
			why = map[string]string{"ParseInt": "a whole number is needed", "ParseFloat": "a number is needed",
				"ParseBool": "true or false is needed"}[n.Func]
		}
		return fmt.Sprintf("invalid value %q for --%s: %s", bad.GetValue(), bad.GetFlag().Name, why)
	}
	return err.Error()
}
