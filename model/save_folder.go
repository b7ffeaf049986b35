package model

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"

	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// The files that are saved beside the weights: tokenizerFiles are of the tokenizer, companions are
// all that is needed to generate text, except the chat templates in templateFolder.
var (
	tokenizerFiles = []string{tokenizerFile, "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
		"added_tokens.json", "vocab.json", "merges.txt", "chat_template.json"}
	companions = append([]string{generationFile, templateFile}, tokenizerFiles...)
)

const (
	tokenizerFile  = "tokenizer.json"
	generationFile = "generation_config.json"
)

// Source names the files that are saved beside the weights.
type Source struct {
	Base string // the folder of the model that is trained; "" = a new model
	// The tokenizer.json of the training data, with its other files beside it; "" = that of Base.
	// Files of two tokenizers are never mixed.
	Tokenizer string
	// The texts of the chat templates by name, such as "default"; empty = the templates of the
	// tokenizer. Templates of two folders are never mixed.
	Templates map[string]string
}

// write copies the files that exist to dir. The chat templates of the job take precedence over
// the ones in tokenizer_config.json.
func (s Source) write(dir string) error {
	tokenizer := s.Tokenizer
	if s.Base != "" {
		if err := copyFiles(dir, s.Base, []string{generationFile}); err != nil {
			return err
		}
		tokenizer = cmp.Or(tokenizer, filepath.Join(s.Base, tokenizerFile))
	}
	templates := s.Templates
	if tokenizer != "" {
		err := copyFile(filepath.Join(dir, tokenizerFile), tokenizer) // it may have another name
		if err == nil {
			err = copyFiles(dir, filepath.Dir(tokenizer), tokenizerFiles[1:])
		}
		if err == nil && len(templates) == 0 {
			templates, err = readTemplates(filepath.Dir(tokenizer))
		}
		if err != nil {
			return err
		}
	}
	return writeTemplates(dir, templates)
}

// Stored is a tensor that WriteFolder writes.
type Stored struct {
	Name  string
	DType tensor.DType // in the file
	Shape []int64
	// Read fills dst with the elements from at on. A tensor is read once, in order.
	Read func(at int64, dst []float32) error

	portions []int // of a model that is saved: the portions that have its elements, in order
}

// WriteFolder writes a Hugging Face folder: the tensors in the given order, each through a buffer,
// and the other files, which rest writes to the folder that it gets. The folder is written
// completely or not at all. If dir exists, its model is replaced and its other files stay.
func WriteFolder(dir string, rest func(dir string) error, tensors []Stored) error {
	return writeWeights(dir, weightsFile, rest, tensors)
}

// writeWeights is WriteFolder with the name of the tensors' file.
func writeWeights(dir, weights string, rest func(dir string) error, tensors []Stored) error {
	dir = tensor.Target(filepath.Clean(dir))
	if err := os.MkdirAll(filepath.Dir(dir), 0o777); err != nil {
		return status.Errorf(status.IO, "%w; choose an output folder that can be written", err)
	}
	temp, err := temporary(dir)
	if err != nil {
		return status.Errorf(status.IO, "%w; choose an output folder that can be written", err)
	}
	defer tensor.Discard(temp)
	if err := rest(temp); err != nil {
		return err
	}
	items := make([]tensor.Item, len(tensors))
	buffer := make([]float32, 1<<16)
	bytes := make([]byte, 0, 8*len(buffer))
	for i, t := range tensors {
		items[i] = tensor.Item{Name: t.Name, Tensor: tensor.Of(nil, t.DType, t.Shape...),
			Write: func(w io.Writer) error {
				return t.write(w, buffer, bytes)
			}}
	}
	if err := tensor.WriteSafetensors(filepath.Join(temp, weights), map[string]string{"format": "pt"},
		items); err != nil {
		return err
	}
	return tensor.Finish(temp, func() error { return replace(dir, temp) })
}

func (t *Stored) write(w io.Writer, buffer []float32, bytes []byte) error {
	n := tensor.Of(nil, t.DType, t.Shape...).Numel()
	for at := int64(0); at < n; at += int64(len(buffer)) {
		src := buffer[:min(int64(len(buffer)), n-at)]
		if err := t.Read(at, src); err != nil {
			return err
		}
		bytes = bytes[:0]
		for i, v := range src {
			switch t.DType {
			case tensor.BF16:
				bytes = binary.LittleEndian.AppendUint16(bytes, tensor.F32ToBF16(v))
			case tensor.F16:
				h := f32ToF16(v)
				if h&0x7fff == 0x7c00 && !math.IsInf(float64(v), 0) {
					return fmt.Errorf("%v at %v is too large for F16: set override dtype = \"float32\"", v,
						indexOf(at+int64(i), t.Shape))
				}
				bytes = binary.LittleEndian.AppendUint16(bytes, h)
			case tensor.F64:
				bytes = binary.LittleEndian.AppendUint64(bytes, math.Float64bits(float64(v)))
			default:
				bytes = binary.LittleEndian.AppendUint32(bytes, math.Float32bits(v))
			}
		}
		if _, err := w.Write(bytes); err != nil {
			return err
		}
	}
	return nil
}

// weightsName is the pattern of the files with weights in model folders, and of their indices.
// Other .safetensors and .bin files may be data, for example token ids.
var weightsName = regexp.MustCompile(
	`^((model|adapter_model|consolidated)[.-](.*\.)?safetensors(\..*)?|(pytorch_model|adapter_model)([.-].*)?\.bin(\..*)?)$`)

// ofModel reports whether WriteFolder replaces a file of this name.
func ofModel(e fs.DirEntry) bool {
	name := e.Name()
	if e.IsDir() {
		return name == templateFolder
	}
	return name == configFile || name == AdapterConfigFile || slices.Contains(companions, name) ||
		weightsName.MatchString(name)
}

// FilesIn lists the files of a folder that WriteFolder would replace; none if the folder does not
// exist.
func FilesIn(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if ofModel(e) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// CopyRest copies the files of a model's folder other than the weights, as SaveRest wrote them, to
// another folder. Only listed files are copied.
func CopyRest(dst, src string, listed []string) error { return copyRest(dst, src, configFile, listed) }

// copyRest is CopyRest with the name of the configuration.
func copyRest(dst, src, config string, listed []string) error {
	var names []string
	for _, name := range listed {
		if name == config || slices.Contains(companions, name) || path.Dir(name) == templateFolder {
			names = append(names, name)
		}
	}
	return copyFiles(dst, src, names)
}

// copyFiles copies the files that exist.
func copyFiles(dst, src string, names []string) error {
	for _, name := range names {
		if err := copyFile(filepath.Join(dst, name), filepath.Join(src, name)); err != nil {
			return err
		}
	}
	return nil
}

func copyFile(dst, src string) error {
	r, _, err := input.Open(src)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return status.Errorf(status.IO, "%w", err)
	}
	defer r.Close()
	if err := os.MkdirAll(filepath.Dir(dst), 0o777); err != nil {
		return status.Errorf(status.IO, "%w", err)
	}
	return tensor.WriteFile(dst, func(w io.Writer) error { _, err := io.Copy(w, r); return err })
}

// f32ToF16 rounds to nearest even. Values of 65520 and more become infinity.
func f32ToF16(f float32) uint16 {
	u := math.Float32bits(f)
	sign, a := uint16(u>>16)&0x8000, u&0x7fffffff
	switch {
	case a > 0x7f800000:
		return sign | 0x7e00
	case a >= 0x47800000: // 2^16
		return sign | 0x7c00
	case a < 0x38800000: // below 2^-14: a multiple of 2^-24
		return sign | uint16(math.RoundToEven(float64(math.Float32frombits(a))*(1<<24)))
	}
	return sign | uint16((a-0x38000000+0xfff+a>>13&1)>>13)
}
