package model

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ulysses/comm"
	"ulysses/internal/input"
	"ulysses/internal/status"
	"ulysses/tensor"
)

const (
	configFile  = "config.json"
	weightsFile = "model.safetensors"
	indexFile   = "model.safetensors.index.json"
)

// Folder is a Hugging Face folder: config.json and model.safetensors, or several safetensors files
// and their index.
type Folder struct {
	Dir    string
	Config *Config

	files []*tensor.Safetensors
	where map[string]location // by the names of this package

	scaled       map[string]*scaled // matrices in FP8, by their names in the files
	packed       map[string]*packed // matrices in MXFP4, by their names without a suffix
	unpackedName string             // of the matrix in unpacked
	unpacked     []float32
}

// location is where a tensor is stored.
type location struct {
	file  *tensor.Safetensors
	entry tensor.Entry
	row   func(int64) int64 // the row in the file of a row of the model; nil = the same
	// the tensor in the file in which row counts, if that is not entry
	whole      *tensor.Entry
	alternates bool // columns of gate and up alternate in the file
	// of a tensor in MXFP4: returns all elements
	decode func() ([]float32, error)
	scaled *scaled // of a tensor in FP8: the matrix of which it is a part
}

// read fills dst with elements from at on.
func (l location) read(at int64, dst []float32) error {
	if l.decode != nil {
		all, err := l.decode()
		if err == nil {
			copy(dst, all[at:])
		}
		return err
	}
	stored := l.entry
	if l.whole != nil {
		stored = *l.whole
	}
	read := func(at int64, dst []float32) error {
		if l.scaled != nil {
			return l.scaled.read(stored, at, dst)
		}
		return l.file.ReadFloat32(stored, at, dst)
	}
	if l.alternates {
		return reordered(at, l.entry.Shape[len(l.entry.Shape)-1], dst, fileColumn, read)
	}
	if l.row == nil {
		return read(at, dst)
	}
	width := l.entry.Numel() / l.entry.Shape[0]
	return byRows(at, width, dst, func(row, column int64, dst []float32) error {
		return read(l.row(row)*width+column, dst)
	})
}

// OpenFolder reads config.json, with some of its fields replaced, and the headers of the weights'
// files.
func OpenFolder(dir string, override map[string]any) (*Folder, error) {
	cfg, err := ReadConfig(dir, override)
	if err != nil {
		return nil, err
	}
	return OpenWeights(dir, cfg)
}

// OpenWeights reads the headers of the weights' files of a folder with a known configuration.
func OpenWeights(dir string, cfg *Config) (*Folder, error) {
	f := &Folder{Dir: dir, Config: cfg, where: map[string]location{}, packed: map[string]*packed{},
		scaled: map[string]*scaled{}}
	err := f.openWeights()
	if err == nil {
		err = f.locatePacked()
	}
	if err == nil {
		err = f.checkScaled()
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	if head, ok := f.where[tiedName]; ok && cfg.TieWordEmbeddings { // tied weights under either name
		if _, both := f.where[embeddingName]; !both {
			f.where[embeddingName] = head
			delete(f.where, tiedName)
		}
	}
	return f, nil
}

// Read fills dst with elements of a tensor, by a name of this package, from at on.
func (f *Folder) Read(name string, at int64, dst []float32) error {
	x, ok := f.where[name]
	if !ok {
		return status.Errorf(status.InvalidConfig, "%s: tensor %s is missing; restore the folder", f.Dir,
			input.Short(name))
	}
	return x.read(at, dst)
}

// OpenBase is OpenWeights of the folder from which a model has been trained, with the configuration
// of the saved model. That does not say how the weights of the folder are quantized.
func OpenBase(dir string, cfg *Config) (*Folder, error) {
	text, err := readConfigText(dir)
	if err != nil {
		return nil, err
	}
	raw, err := fieldsOf(text)
	if err != nil {
		return nil, status.Errorf(status.Of(err), "%s: %w", dir, err)
	}
	own := *cfg
	own.readPacking(&reader{raw: raw, seen: map[string]bool{}})
	return OpenWeights(dir, &own)
}

// ReadConfig reads a folder's config.json, with some of its fields replaced. It does not need the
// weights.
func ReadConfig(dir string, override map[string]any) (*Config, error) {
	text, err := readConfigText(dir)
	if err != nil {
		return nil, err
	}
	cfg, err := parseConfig(text, override)
	if err != nil {
		return nil, status.Errorf(status.Of(err), "%s: %w", dir, err)
	}
	return cfg, nil
}

// readConfigText returns the text of a folder's config.json.
func readConfigText(dir string) ([]byte, error) {
	text, err := input.Read(filepath.Join(dir, configFile), input.MaxConfig)
	if err == nil {
		return text, nil
	}
	var pointer *input.PointerError
	if errors.As(err, &pointer) {
		return nil, status.Errorf(status.IO, "%w", err)
	}
	fix := "give a Hugging Face folder with config.json and *.safetensors"
	if _, statErr := os.Stat(dir); errors.Is(statErr, fs.ErrNotExist) {
		return nil, status.Errorf(status.IO, "there is no folder %s; %s", dir, fix)
	}
	if errors.Is(err, fs.ErrNotExist) {
		fix = cmp.Or(instead(dir), fix)
		return nil, status.Errorf(status.IO, "%s: no %s here; %s", dir, configFile, fix)
	}
	return nil, status.Errorf(status.IO, "%s: %w; %s", dir, err, fix)
}

// instead returns the fix for a folder without a model that has the results of a run: the model in
// it, adapters to merge, or a checkpoint to export; "" = none of them.
func instead(dir string) string {
	inside := filepath.Join(dir, "model") // as in output.dir of a run
	names, _ := FilesIn(inside)
	if slices.ContainsFunc(names, weightsName.MatchString) { // not in a checkpoint
		return "name " + inside
	}
	for _, folder := range []string{dir, filepath.Join(dir, "adapter")} {
		if _, err := os.Stat(filepath.Join(folder, AdapterConfigFile)); err == nil {
			return fmt.Sprintf("merge its adapters with ulysses-mpi export %s MODEL-FOLDER --merge", folder)
		}
	}
	steps := append(input.Match(dir, "step-*"), input.Match(filepath.Join(dir, "checkpoints"), "step-*")...)
	for _, folder := range append(steps, dir) {
		if _, err := os.Stat(filepath.Join(folder, "manifest.json")); err == nil {
			return fmt.Sprintf("write the model of its checkpoint with ulysses-mpi export %s MODEL-FOLDER", dir)
		}
	}
	return ""
}

// Files returns the files from which the model is read, so that ranks can compare their copies.
func (f *Folder) Files() []comm.File {
	all := []comm.File{{Name: configFile, Path: filepath.Join(f.Dir, configFile)}}
	for _, s := range f.files {
		all = append(all, comm.SafetensorsFile(filepath.Base(s.Path), s))
	}
	return all
}

// Close closes the files.
func (f *Folder) Close() {
	for _, s := range f.files {
		s.Close()
	}
	f.files = nil
}

func (f *Folder) openWeights() error {
	path := filepath.Join(f.Dir, weightsFile)
	if _, err := os.Stat(path); err == nil {
		return f.openFile(weightsFile)
	}
	text, err := input.Read(filepath.Join(f.Dir, indexFile), input.MaxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		found := ""
		entries, _ := os.ReadDir(f.Dir)
		for _, e := range entries {
			if found == "" && strings.HasSuffix(e.Name(), ".bin") {
				found = fmt.Sprintf(" (%s is there: convert it with transformers' save_pretrained)", e.Name())
			}
		}
		return status.Errorf(status.IO, "%s: neither %s nor %s%s: the weights are missing", f.Dir, weightsFile,
			indexFile, found)
	} else if err != nil {
		return status.Errorf(status.IO, "%s: %w", f.Dir, err)
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := input.JSON(input.TrimBOM(text), &index); err != nil || len(index.WeightMap) == 0 {
		return status.Errorf(status.InvalidConfig, "%s/%s: no usable weight_map (%v): the file is damaged", f.Dir,
			indexFile, err)
	}
	for _, name := range slices.Compact(slices.Sorted(maps.Values(index.WeightMap))) {
		if name != filepath.Base(name) || !filepath.IsLocal(name) {
			return status.Errorf(status.InvalidConfig,
				"%s/%s: weight_map names %s; it may name only files in the folder itself", f.Dir, indexFile,
				input.Quote(name))
		}
		if err := f.openFile(name); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(index.WeightMap)) {
		if _, _, ok := f.Config.mxEntry(f.Config.family.files.textName(name)); ok {
			continue // locatePacked
		} else if f.Config.isScales(name) {
			continue // checkScaled
		}
		text := f.Config.nameOf(name)
		if x, before, after := f.Config.family.files.fusedAs(text); x != nil {
			text = before + "." + x.parts[0] + "." + after
		}
		at, ok := f.where[text]
		if file := index.WeightMap[name]; !ok || filepath.Base(at.file.Path) != file {
			return status.Errorf(status.InvalidConfig,
				"%s/%s: tensor %s is not in %s; the index does not match the files",
				f.Dir, indexFile, input.Short(name), input.Short(file))
		}
	}
	return nil
}

func (f *Folder) openFile(name string) error {
	s, err := tensor.OpenSafetensors(filepath.Join(f.Dir, name))
	if err != nil {
		return err
	}
	f.files = append(f.files, s)
	for _, stored := range s.Entries() {
		if f.addPacked(stored, s) {
			continue
		}
		quantized := f.addScaled(stored, s)
		if f.Config.isScales(stored.Name) {
			continue
		}
		parts, err := f.Config.partsOf(stored)
		if err != nil {
			return status.Errorf(status.Of(err), "%s: %w", s.Path, err)
		}
		for own, at := range parts {
			if first, twice := f.where[own]; twice {
				return status.Errorf(status.InvalidConfig, "%s: tensor %s is in %s and in %s: remove one", f.Dir,
					input.Short(at.entry.Name), filepath.Base(first.file.Path), name)
			}
			if at.file = s; quantized != nil {
				at.scaled, at.entry.DType = quantized, tensor.BF16
			}
			f.where[own] = at
		}
	}
	return nil
}

// Check compares the tensors in the files with the parameters of the model. The error lists all
// differences.
func (f *Folder) Check(m *Model) error {
	var faults []string
	expected := map[string]bool{}
	for _, g := range m.groups {
		for _, p := range g.Params {
			if p.isAdapter() {
				continue
			}
			expected[p.Name] = true
			at, ok := f.where[p.Name]
			if !ok {
				fault := fmt.Sprintf("tensor %s%v is missing", p.Name, p.Shape)
				if p.Name == tiedName {
					fault += ": set override tie_word_embeddings = true if the head is the embedding"
				}
				faults = append(faults, fault)
				continue
			}
			faults = append(faults, p.disagree(at.entry)...)
		}
	}
	faults = append(faults, f.checkBiases(expected)...)
	for _, name := range slices.Sorted(maps.Keys(f.where)) {
		if !expected[name] && !m.Config.ignored(name) && !(name == tiedName && m.Config.TieWordEmbeddings) {
			faults = append(faults,
				fmt.Sprintf("tensor %v is not a parameter of a %s with this configuration", f.where[name].entry,
					m.Config.ModelType))
		}
	}
	return list(status.InvalidConfig, f.Dir+": the weights do not fit config.json", faults)
}

const (
	embeddingName = "model.embed_tokens.weight"
	tiedName      = "lm_head.weight"
)

// ignored matches buffers that old versions of transformers saved and that are computed from the
// configuration, and the dropped tensors of the family.
func (c *Config) ignored(name string) bool {
	return strings.HasSuffix(name, ".rotary_emb.inv_freq") || c.droppedBy(name) != ""
}

// disagree returns the differences between a parameter and a tensor in a file.
func (p *Param) disagree(e tensor.Entry) (faults []string) {
	if !slices.Equal(e.Shape, p.Shape) {
		faults = append(faults,
			fmt.Sprintf("tensor %s is %v in the file, config.json says %v (%s): correct one of them",
				p.Name, e.Shape, p.Shape, strings.Join(p.axes, ", ")))
	}
	if !isFloat(e.DType) {
		faults = append(faults,
			fmt.Sprintf("tensor %s is %s: F32, BF16 and F16 can be read", p.Name, input.Short(e.TypeName)))
	}
	return faults
}

// isFloat reports whether the program reads numbers of an element type of a file.
func isFloat(d tensor.DType) bool {
	return d == tensor.F32 || d == tensor.BF16 || d == tensor.F16 || d == tensor.F64
}

// Load checks the files and reads the elements that this rank owns of the parameters of m, which
// was made with f.Config, except adapters. NaN and Inf are errors (Numeric).
func (f *Folder) Load(m *Model) error {
	if err := f.Check(m); err != nil {
		return err
	}
	biases, err := f.Biases()
	if err == nil {
		err = m.SetBiases(biases)
	}
	if err != nil {
		return err
	}
	s, err := m.dev.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	buffer := make([]float32, 1<<18)
	for _, g := range m.groups {
		for _, p := range g.Params {
			if p.isAdapter() {
				continue
			}
			at := f.where[p.Name]
			if !m.Config.forced {
				p.stored = at.entry.DType
			}
			err := m.upload(s, p, buffer[:min(int64(len(buffer)), p.Numel())], func(start int64, dst []float32) error {
				if err := at.read(start, dst); err != nil {
					return err
				}
				return finite(at, start, dst)
			})
			if err != nil {
				return err
			}
		}
	}
	if second, ok := f.where[tiedName]; ok && m.Config.TieWordEmbeddings {
		return f.checkTied(second, buffer)
	}
	return nil
}

// checkTied returns an error if a second copy of tied weights differs from the first.
func (f *Folder) checkTied(second location, buffer []float32) error {
	first := f.where[embeddingName]
	same := slices.Equal(first.entry.Shape, second.entry.Shape)
	half := len(buffer) / 2
	for start, n := int64(0), first.entry.Numel(); same && start < n; start += int64(half) {
		a, b := buffer[:min(int64(half), n-start)], buffer[half:][:min(int64(half), n-start)]
		if err := errors.Join(first.read(start, a), second.read(start, b)); err != nil {
			return status.Errorf(status.IO, "%s: %w", f.Dir, err)
		}
		same = slices.Equal(a, b)
	}
	if !same {
		return status.Errorf(status.InvalidConfig,
			"%s: %v differs from %v, but tie_word_embeddings is true: set override tie_word_embeddings = false",
			f.Dir, second.entry, first.entry)
	}
	return nil
}

// finite returns an error if x, the elements of a tensor from start on, has NaN or Inf.
func finite(at location, start int64, x []float32) error {
	if i := firstNonFinite(x); i >= 0 {
		return status.Errorf(status.Numeric, "%s: tensor %s has %v at %v: the weights are damaged", at.file.Path,
			at.entry.Name, x[i], indexOf(start+int64(i), at.entry.Shape))
	}
	return nil
}

// firstNonFinite returns the index of the first NaN or Inf of x, -1 if there is none.
func firstNonFinite(x []float32) int {
	return slices.IndexFunc(x, func(v float32) bool {
		return math.IsNaN(float64(v)) || math.IsInf(float64(v), 0)
	})
}

// indexOf returns the index of an element in each axis.
func indexOf(i int64, shape []int64) []int64 {
	at := make([]int64, len(shape))
	for a := len(shape) - 1; a >= 0; a-- {
		at[a], i = i%shape[a], i/shape[a]
	}
	return at
}
