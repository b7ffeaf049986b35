package data

import (
	"encoding/json"
	"slices"
	"sync"
	"time"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
)

// opening is what the pass over the files is made with.
type opening struct {
	Options
	config Config
}

// agree makes the error of the lowest rank that has one everybody's. Collective.
func (o *opening) agree(err error) error {
	if o.Comm == nil {
		return err
	}
	var mine []byte
	if err != nil {
		mine, _ = json.Marshal(fault{Line: none, Doc: none, Code: status.Of(err), Rest: err.Error()})
	}
	all, e := comm.GatherBytes(o.Comm, mine)
	if e != nil {
		return e
	}
	for _, b := range all {
		if len(b) == 0 {
			continue
		}
		var f fault
		if e := json.Unmarshal(b, &f); e != nil {
			return status.Errorf(status.Internal, "data.Open: an error that cannot be read: %w", e)
		}
		return f.at("", 0, 0)
	}
	return nil
}

// gather brings what each rank has to all.
func (o *opening) gather(mine []byte) ([][]byte, error) {
	if o.Comm == nil {
		return [][]byte{mine}, nil
	}
	return comm.GatherBytes(o.Comm, mine)
}

func (o *opening) place() (rank, size int64) {
	if o.Comm == nil {
		return 0, 1
	}
	return int64(o.Comm.Rank()), int64(o.Comm.Size())
}

func (o *opening) decoder() *decoder {
	return &decoder{encoder: o.Tokenizer, addEOS: o.config.AddEOS, vocab: o.Vocab, sequence: o.config.Sequence}
}

// survey is the opening pass over files that follow one another. The ranks share the work out by
// bytes, the workers of a rank by units. What is found is a function of the files and of the units'
// sizes; what becomes of it, of the files alone.
type survey struct {
	*opening
	files []format
	lo    int64 // of the work: this rank's units start in [lo, hi)
	hi    int64

	mu    sync.Mutex
	file  int   // of the next unit
	at    int64 // its start, counted from the file's
	base  int64 // the file's, counted over all files
	next  int64 // its number
	parts []part
	bad   *fault // of the first unit that has one
	badAt int64
}

// part is what a unit gave.
type part struct {
	number int64
	blocks []found
}

// round bounds the time between two calls in which the ranks meet: a rank that is late in a call
// ends the job.
const round = 20 * time.Second

// survey finds the blocks of all files. Collective; all ranks get the same, or the same error.
func (o *opening) survey(files []format) ([]found, error) {
	s := &survey{opening: o, files: files}
	total := int64(0)
	for _, f := range files {
		total += f.work()
	}
	rank, size := o.place()
	share := func(r int64) int64 { return total/size*r + total%size*r/size }
	s.lo, s.hi = share(rank), share(rank+1)
	workers := make([]*decoder, max(1, min(o.Workers, maxWorkers)))
	for i := range workers {
		workers[i] = o.decoder()
		defer workers[i].close()
	}
	for {
		more := s.work(workers)
		done, err := s.meet(more)
		if err != nil {
			return nil, err
		}
		if done {
			return s.exchange()
		}
	}
}

// maxWorkers bounds the buffers of a rank.
const maxWorkers = 16

// work takes units until none is left or the round is over, and reports which.
func (s *survey) work(workers []*decoder) (more bool) {
	end := time.Now().Add(round)
	var wg sync.WaitGroup
	for _, d := range workers {
		wg.Go(func() {
			for time.Now().Before(end) && s.one(d) {
			}
		})
	}
	wg.Wait()
	_, _, _, more = s.claim()
	return more
}

// claim is the next unit, which stays the next one until it is taken.
func (s *survey) claim() (file int, lo, hi int64, ok bool) {
	for s.bad == nil && s.file < len(s.files) && s.base+s.at < s.hi {
		f := s.files[s.file]
		switch {
		case s.at >= f.work():
			s.base, s.file, s.at = s.base+f.work(), s.file+1, 0
		case s.base+s.at < s.lo: // an earlier rank's
			s.at = min(f.work(), (s.lo-s.base+f.unit()-1)/f.unit()*f.unit())
		default:
			return s.file, s.at, min(s.at+f.unit(), f.work()), true
		}
	}
	return 0, 0, 0, false
}

// one scans the next unit.
func (s *survey) one(d *decoder) bool {
	s.mu.Lock()
	file, lo, hi, ok := s.claim()
	number := s.next
	if ok {
		s.at, s.next = hi, number+1
	}
	s.mu.Unlock()
	if !ok {
		return false
	}
	d.blocks = d.blocks[:0]
	err := s.files[file].scan(d, lo, hi)
	d.shrink()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		if s.bad == nil || number < s.badAt {
			s.bad, s.badAt = faultOf(err, file), number
		}
		return false
	}
	for i := range d.blocks {
		d.blocks[i].file = int32(file)
	}
	if len(d.blocks) > 0 {
		s.parts = append(s.parts, part{number, slices.Clone(d.blocks)})
	}
	return true
}

// meet tells whether the pass is over: no rank has more to do, but those behind one that has found
// a fault.
func (s *survey) meet(more bool) (done bool, err error) {
	state := []byte{'d'}
	if s.bad != nil {
		state[0] = 'f'
	} else if more {
		state[0] = 'm'
	}
	all, err := s.gather(state)
	if err != nil {
		return false, err
	}
	rank, _ := s.place()
	done = true
	for r, b := range all {
		if b[0] == 'f' {
			if rank > int64(r) {
				s.hi = s.lo
			}
			return done, nil
		}
		done = done && b[0] == 'd'
	}
	return done, nil
}

// exchange brings the blocks of all ranks together, or the first fault.
func (s *survey) exchange() ([]found, error) {
	slices.SortFunc(s.parts, func(a, b part) int { return int(a.number - b.number) })
	var mine []found
	for _, p := range s.parts {
		if s.bad == nil || p.number < s.badAt {
			mine = append(mine, p.blocks...)
		}
	}
	s.parts = nil
	bad, _ := json.Marshal(s.bad)
	faults, err := s.gather(bad)
	if err != nil {
		return nil, err
	}
	blocks, err := s.gather(bytesOf(mine))
	if err != nil {
		return nil, err
	}
	var all []found
	for r, b := range blocks {
		all = append(all, foundIn(b)...)
		var bad *fault
		if err := json.Unmarshal(faults[r], &bad); err != nil {
			return nil, status.Errorf(status.Internal, "data.Open: an error that cannot be read: %w", err)
		}
		if bad == nil {
			continue
		}
		lines, docs := int64(0), int64(0)
		for _, x := range all {
			docs += x.doc
			if int(x.file) == bad.File {
				lines += x.lines
			}
		}
		return nil, bad.at(s.files[bad.File].path(), lines, docs)
	}
	return all, nil
}

// bytesOf and foundIn carry blocks between ranks as they lie in memory: all ranks run the same
// program.
func bytesOf(blocks []found) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(blocks))), len(blocks)*int(unsafe.Sizeof(found{})))
}

func foundIn(b []byte) []found {
	blocks := make([]found, len(b)/int(unsafe.Sizeof(found{})))
	copy(bytesOf(blocks), b)
	return blocks
}
