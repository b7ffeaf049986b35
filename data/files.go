package data

import (
	"cmp"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"unicode"

	"ulysses/comm"
	"ulysses/data/chat"
	"ulysses/data/unpack"
	"ulysses/internal/input"
	"ulysses/internal/status"
)

// dataFile is a file of data.path or eval.path.
type dataFile struct {
	path    string
	name    string   // path, or without .gz, .zst and .parquet
	paths   []string // path, or the two files of a Megatron dataset
	size    int64
	formats []format // nil for a .safetensors file
}

// formatKeys has the keys of the formats of lines, by the keys of the files.
var formatKeys = map[string]string{"data.path": "data.format", "data.source": "format of this [[data.source]]",
	"eval.path": "eval.format", "eval.set": "format of this [[eval.set]]"}

// listFiles returns the files of a key in order, with their formats. lines is the format of lines.
// Compressed files are expanded if o.expanded is not nil.
func listFiles(o *opener, key string, patterns []string, lines string) ([]dataFile, error) {
	paths, err := glob(key, patterns)
	if err != nil {
		return nil, err
	}
	files := make([]dataFile, len(paths))
	total, named := int64(0), map[string]bool{}
	for i, path := range paths {
		named[path] = true
		info, err := input.StatContent(path)
		if err != nil {
			return nil, status.Errorf(status.IO, "%s: %s: cannot be read: %w", key, path, err)
		}
		files[i] = dataFile{path: path, paths: []string{path}, size: info.Size(), name: path}
		if idx, bin := megatronFiles(path); path == idx {
			if info, err = input.StatContent(bin); err == nil { // openMegatron reports a missing file
				files[i].size = info.Size()
			}
		}
		if inner, packed := unpack.Inner(path); packed {
			files[i].name = inner
			if o.expanded == nil { // the files are only compared
				continue
			}
			if files[i].size, err = o.expand(path); err != nil {
				return nil, err
			}
		}
		total += files[i].size
	}
	unit := cmp.Or(o.block, unitBytes(total))
	kept := files[:0]
	for _, f := range files {
		ext := strings.ToLower(filepath.Ext(f.name))
		if _, packed := unpack.Inner(f.path); packed && ext != ".txt" && ext != ".jsonl" {
			return nil, status.Errorf(status.InvalidConfig,
				"%s: %s: a compressed file of the extension %q is not supported; compress .txt or .jsonl files, or expand it",
				key, f.path, ext)
		}
		switch ext {
		case ".txt":
			if f.formats = []format{&txtBytes{f.path, f.size, max(unit, int64(len(input.BOM)+1))}}; o.Tokenizer != nil {
				f.formats[0] = &txtTokens{f.path, f.size, unit}
			}
		case ".jsonl":
			f.formats = []format{&jsonl{f.path, f.size, unit, cmp.Or(lines, chat.Auto), formatKeys[key],
				o.config.TextField, cmp.Or(o.line, maxLine)}}
		case ".bin", ".idx":
			m, err := openMegatron(f.path, max(unit, 64))
			if err != nil {
				return nil, err
			}
			if f.path == m.idx && named[m.bin] {
				continue // the key names both files of the dataset
			}
			f.paths = []string{m.idx, m.bin}
			f.formats = []format{megatronIndex{m}, megatronTokens{m}}
		case ".safetensors":
		default:
			return nil, status.Errorf(status.InvalidConfig,
				"%s: %s: the extension %q is not supported; use .txt, .jsonl or .parquet, also with .gz or .zst, .bin with .idx, or .safetensors",
				key, f.path, ext)
		}
		kept = append(kept, f)
	}
	return kept, nil
}

// expand expands a file of compressed text or of rows, and returns the size of the text.
func (o *opener) expand(path string) (int64, error) {
	f := o.expanded[path]
	if f == nil {
		var err error
		if f, err = unpack.Open(path, append([]string{o.config.TextField}, chat.Fields...)); err != nil {
			return 0, err
		}
		o.expanded[path] = f
	}
	info, err := f.Stat()
	if err != nil {
		return 0, status.Errorf(status.IO, "%s: %w", path, err)
	}
	return info.Size(), nil
}

// unitBytes returns the bytes of a unit, which is about the size of a block, for the given bytes of
// data. Blocks are small, because to read a sequence whole blocks are decoded. There are at most
// about a million, whose index needs about 64 MiB. The result is a power of two, so that all bytes
// of a token of a .bin are in the same block.
func unitBytes(total int64) int64 {
	return max(32<<10, int64(1)<<bits.Len64(uint64(total>>20)))
}

// checkSameFiles returns an error if the files differ between ranks, because a rank reads blocks
// that other ranks have checked. nil c = one rank. Collective.
func checkSameFiles(c comm.Comm, key string, files []dataFile) error {
	if c == nil {
		return nil
	}
	return comm.SameFiles(c, key, compared(files))
}

// wildcards are the special characters of patterns.
const wildcards = `*?[`

// glob returns the files that match the patterns, sorted for each pattern. A pattern that is the
// name of an existing file stands for this file.
func glob(key string, patterns []string) ([]string, error) {
	var paths []string
	for _, p := range patterns {
		written := p
		info, err := os.Stat(p)
		name, plain := literal(p)
		if plain = plain && err != nil; plain {
			p = name
			info, err = os.Stat(p)
		}
		found := []string{p}
		switch {
		case err == nil && info.IsDir():
			return nil, status.Errorf(status.IO, "%s: %s is a folder; name its files, such as %s", key, p,
				filepath.Join(p, "*.txt"))
		case err != nil && strings.ContainsAny(p, wildcards) && !plain:
			if slices.Contains(strings.Split(p, "/"), "**") { // in filepath.Glob it is the same as *
				return nil, status.Errorf(status.InvalidConfig,
					"%s: %q: ** is not supported; write a pattern for each depth, such as */*.txt", key, p)
			}
			if found, err = filepath.Glob(p); err != nil {
				return nil, status.Errorf(status.InvalidConfig, "%s: %q is not a valid pattern: %w", key, p, err)
			}
			found = slices.DeleteFunc(found, func(name string) bool { return hidden(p, name) })
			if len(found) == 0 {
				return nil, status.Errorf(status.IO, "%s: no file matches %q", key, p)
			}
			sort.Strings(found)
		case os.IsNotExist(err) && strings.ContainsFunc(p, unicode.IsControl): // as of "data\train.txt"
			return nil, status.Errorf(status.IO, "%s: %q: no such file; write / between folders", key, p)
		case os.IsNotExist(err) && plain:
			return nil, status.Errorf(status.IO,
				"%s: %s: no such file; in the pattern %s, a \\ makes the next character a plain one", key, p, written)
		case os.IsNotExist(err):
			return nil, status.Errorf(status.IO, "%s: %s: no such file", key, p)
		case err != nil:
			return nil, status.Errorf(status.IO, "%s: %s: cannot be read: %w", key, p, err)
		}
		paths = append(paths, found...)
	}
	return paths, nil
}

// hidden reports whether a name that matches a pattern has a dot at the start of a folder or file
// where the pattern has none. As in a shell, wildcards do not match this dot: such files are
// remains and copies of programs, as the folder .ipynb_checkpoints.
func hidden(pattern, name string) bool {
	of := strings.Split(filepath.Clean(pattern), "/")
	for i, x := range strings.Split(filepath.Clean(name), "/") {
		if strings.HasPrefix(x, ".") && i < len(of) && !strings.HasPrefix(strings.TrimPrefix(of[i], `\`), ".") {
			return true
		}
	}
	return false
}

// literal returns the name that a pattern without wildcards matches, without its escapes; false for
// any other pattern, and for a name without escapes.
func literal(pattern string) (name string, ok bool) {
	b := make([]byte, 0, len(pattern))
	for i := 0; i < len(pattern); i++ {
		switch c := pattern[i]; {
		case c == '\\' && i+1 < len(pattern):
			i++
		case strings.IndexByte(wildcards, c) >= 0:
			return "", false
		}
		b = append(b, pattern[i])
	}
	return string(b), len(b) < len(pattern)
}

// Files returns the files that a key of the job file names (data.path, eval.path), so that ranks
// can compare their copies before they open them.
func Files(key string, patterns []string, c Config) ([]comm.File, error) {
	list, err := listFiles(&opener{config: c}, key, patterns, chat.Auto)
	if err != nil {
		return nil, err
	}
	return compared(list), nil
}

// compared returns the files as comm.SameFiles compares them.
func compared(files []dataFile) (all []comm.File) {
	for _, f := range files {
		for _, path := range f.paths {
			all = append(all, comm.File{Name: path, Path: path})
		}
	}
	return all
}
