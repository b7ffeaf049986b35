package data

import (
	"cmp"
	"math/bits"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/status"
)

// listed is a file that a key names.
type listed struct {
	path    string
	paths   []string // all files of it: a Megatron dataset has two
	size    int64
	formats []format // how its documents are read; nil for a .safetensors file
}

// listFiles finds the files of a key in order and says how each is read.
func listFiles(o *opening, key string, patterns []string) ([]listed, error) {
	paths, err := glob(key, patterns)
	if err != nil {
		return nil, err
	}
	files := make([]listed, len(paths))
	total := int64(0)
	for i, path := range paths {
		info, err := input.Stat(path)
		if err != nil {
			return nil, status.Errorf(status.IO, "%s: %s: cannot be read: %w", key, path, err)
		}
		files[i] = listed{path: path, paths: []string{path}, size: info.Size()}
		total += info.Size()
	}
	step := cmp.Or(o.block, blockBytes(total))
	kept := files[:0]
	for i, f := range files {
		switch ext := strings.ToLower(filepath.Ext(f.path)); ext {
		case ".txt":
			if f.formats = []format{&txtBytes{f.path, f.size, max(step, int64(len(input.BOM)+1))}}; o.Tokenizer != nil {
				f.formats[0] = &txtTokens{f.path, f.size, step}
			}
		case ".jsonl":
			f.formats = []format{&jsonl{f.path, f.size, step, o.config.TextField, maxLine}}
		case ".bin", ".idx":
			m, err := openMegatron(f.path, max(step, 64))
			if err != nil {
				return nil, err
			}
			if i > 0 && f.path != paths[i-1] && (m.idx == paths[i-1] || m.bin == paths[i-1]) {
				continue // a pattern, or a careful author, names both files
			}
			f.paths = []string{m.idx, m.bin}
			f.formats = []format{megatronIndex{m}, megatronTokens{m}}
		case ".safetensors":
		default:
			return nil, status.Errorf(status.InvalidConfig, "%s: %s: unknown kind of data file %q: use .txt, .jsonl, .bin with .idx, or .safetensors", key, f.path, ext)
		}
		kept = append(kept, f)
	}
	return kept, nil
}

// blockBytes is the size of a block: small, because a row costs the decoding of whole blocks, but
// such that of any amount of data there are no more than a million, whose index takes about 64 MiB.
// It is a power of two, so that no token of a .bin is cut.
func blockBytes(total int64) int64 {
	return max(32<<10, int64(1)<<bits.Len64(uint64(total>>20)))
}

// same refuses files that differ between the ranks, because a rank reads blocks that another rank
// may have checked.
func (o *opening) same(key string, files []listed) error {
	if o.Comm == nil {
		return nil
	}
	var all []comm.File
	for _, f := range files {
		for _, path := range f.paths {
			all = append(all, comm.File{Name: path, Path: path})
		}
	}
	return comm.SameFiles(o.Comm, key, all)
}

// wildcards are the characters that make a name a pattern.
const wildcards = `*?[`

// glob expands patterns, the files of each in order. A name that exists is taken literally.
func glob(key string, patterns []string) ([]string, error) {
	var paths []string
	for _, p := range patterns {
		info, err := os.Stat(p)
		name, plain := literal(p)
		if plain = plain && err != nil; plain {
			p = name
			info, err = os.Stat(p)
		}
		found := []string{p}
		switch {
		case err == nil && info.IsDir():
			return nil, status.Errorf(status.IO, "%s: %s is a folder: name its files, such as %s", key, p, filepath.Join(p, "*.txt"))
		case err != nil && strings.ContainsAny(p, wildcards) && !plain:
			if found, err = filepath.Glob(p); err != nil {
				return nil, status.Errorf(status.InvalidConfig, "%s: %q is not a pattern: %w", key, p, err)
			}
			if len(found) == 0 {
				return nil, status.Errorf(status.IO, "%s: no file matches %q", key, p)
			}
			sort.Strings(found)
		case os.IsNotExist(err):
			return nil, status.Errorf(status.IO, "%s: %s: no such file", key, p)
		case err != nil:
			return nil, status.Errorf(status.IO, "%s: %s: cannot be read: %w", key, p, err)
		}
		paths = append(paths, found...)
	}
	return paths, nil
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
