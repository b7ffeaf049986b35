package job

import (
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"ulysses/internal/status"
	"ulysses/job/file"
)

// shells maps a shell to the function that writes its completion script.
var shells = map[string]func(root *cobra.Command, w io.Writer) error{
	"bash":       func(root *cobra.Command, w io.Writer) error { return root.GenBashCompletionV2(w, true) },
	"zsh":        func(root *cobra.Command, w io.Writer) error { return root.GenZshCompletion(w) },
	"fish":       func(root *cobra.Command, w io.Writer) error { return root.GenFishCompletion(w, true) },
	"powershell": func(root *cobra.Command, w io.Writer) error { return root.GenPowerShellCompletionWithDesc(w) },
}

func shellNames() []string { return slices.Sorted(maps.Keys(shells)) }

// completion is the verb completion: o.words has the shell.
func completion(o Options) error {
	write := shells[o.words[0]]
	if write == nil {
		return status.Errorf(status.InvalidArgument, "completion %s: no script for this shell; use %s", o.words[0],
			strings.Join(shellNames(), ", "))
	}
	root := newCommands(&Options{}, func(*verb, *cobra.Command, []string) {})
	return written(0, write(root, o.Stdout))
}

// completeWords completes the words of a verb in a shell: job files, and folders for the others.
func completeWords(v *verb) cobra.CompletionFunc {
	return func(cmd *cobra.Command, words []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		switch {
		case v.option != "" && len(words) == len(v.words):
			return nil, cobra.ShellCompDirectiveFilterDirs
		case len(words) >= len(v.words):
			return nil, cobra.ShellCompDirectiveNoFileComp
		case !cmd.HasParent():
			return nil, cobra.ShellCompDirectiveDefault // the verbs, or any file
		case v.words[len(words)] == jobFile:
			return []cobra.Completion{"toml"}, cobra.ShellCompDirectiveFilterFileExt
		case v.name == "completion":
			return shellNames(), cobra.ShellCompDirectiveNoFileComp
		}
		return nil, cobra.ShellCompDirectiveFilterDirs
	}
}

// completeFlags completes the values of a command's flags.
func completeFlags(cmd *cobra.Command) {
	must := func(err error) {
		if err != nil { // the flag is not defined
			panic(err)
		}
	}
	must(cmd.RegisterFlagCompletionFunc("set", completeSet))
	must(cmd.RegisterFlagCompletionFunc("cluster",
		cobra.FixedCompletions([]cobra.Completion{"toml"}, cobra.ShellCompDirectiveFilterFileExt)))
	must(cmd.RegisterFlagCompletionFunc("tensors",
		cobra.FixedCompletions([]cobra.Completion{"safetensors"}, cobra.ShellCompDirectiveFilterFileExt)))
	must(cmd.RegisterFlagCompletionFunc("log", cobra.FixedCompletions(logForms, cobra.ShellCompDirectiveNoFileComp)))
	must(cmd.RegisterFlagCompletionFunc("ranks", cobra.NoFileCompletions))
}

// completeSet completes --set: the key first, then its value if the key takes one of a few words.
func completeSet(_ *cobra.Command, _ []string, typed string) (found []cobra.Completion, next cobra.ShellCompDirective) {
	found = file.Completions(typed)
	if strings.Contains(typed, "=") {
		return found, cobra.ShellCompDirectiveNoFileComp
	}
	return found, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}
