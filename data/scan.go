package data

import (
	"encoding/binary"
	"encoding/json"
	"slices"
	"sync"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
)

// scan finds the blocks of consecutive files. The ranks divide the bytes of the files, and the
// goroutines of a rank divide the units. The blocks depend on the files and the size of the units.
// The sequences made from them depend on the files alone.
type scan struct {
	*opener
	files  []format
	lo, hi int64 // this rank scans the units that start in bytes [lo, hi) of all files

	mu     sync.Mutex
	file   int   // of the next unit
	at     int64 // start of the next unit in its file
	base   int64 // bytes of the files before this file
	next   int64 // number of the next unit of this rank
	found  []unitBlocks
	fault  *fault // of the first unit that has one; nil = none
	failed int64  // number of this unit
}

// unitBlocks are the blocks of one unit.
type unitBlocks struct {
	number int64
	blocks []foundBlock
	starts []uint32 // positions in the blocks where documents start, if they are needed
}

// maxWorkers limits the goroutines of a rank, and thereby the memory of their buffers.
const maxWorkers = 16

// scan finds the blocks of all files. All ranks get the same blocks, or the same error. Collective.
//
// If Config.needsStarts, starts has the positions in the blocks at which documents start, for
// all blocks in order; otherwise it is nil.
func (o *opener) scan(files []format) (found []foundBlock, starts []uint32, err error) {
	s := &scan{opener: o, files: files}
	total := int64(0)
	for _, f := range files {
		total += f.work()
	}
	rank, size := o.rank()
	share := func(r int64) int64 { return total/size*r + total%size*r/size }
	s.lo, s.hi = share(rank), share(rank+1)
	if err := comm.Rounds(s.scanUnits, s.done); err != nil {
		return nil, nil, err
	}
	return s.gatherBlocks()
}

// scanUnits scans all units of this rank.
func (s *scan) scanUnits() {
	var wg sync.WaitGroup
	for range max(1, min(s.Workers, maxWorkers)) {
		wg.Go(func() {
			d := s.decoder()
			defer d.close()
			for s.scanUnit(d) {
			}
		})
	}
	wg.Wait()
}

// stop ends the scan of this rank after the units that are being scanned.
func (s *scan) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hi = s.lo
}

// nextUnit returns the bytes [lo, hi) of a file that the next unit has; false if none is left.
func (s *scan) nextUnit() (file int, lo, hi int64, ok bool) {
	for s.fault == nil && s.file < len(s.files) && s.base+s.at < s.hi {
		f := s.files[s.file]
		switch {
		case s.at >= f.work():
			s.base, s.file, s.at = s.base+f.work(), s.file+1, 0
		case s.base+s.at < s.lo: // a lower rank scans this unit
			s.at = min(f.work(), (s.lo-s.base+f.unit()-1)/f.unit()*f.unit())
		default:
			return s.file, s.at, min(s.at+f.unit(), f.work()), true
		}
	}
	return 0, 0, 0, false
}

// scanUnit scans the next unit. It returns false if there is none or if the unit has a fault.
func (s *scan) scanUnit(d *decoder) bool {
	s.mu.Lock()
	file, lo, hi, ok := s.nextUnit()
	number := s.next
	if ok {
		s.at, s.next = hi, number+1
	}
	s.mu.Unlock()
	if !ok {
		return false
	}
	d.blocks, d.starts = d.blocks[:0], d.starts[:0]
	err := s.files[file].scan(d, lo, hi)
	d.releaseLarge()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		if s.fault == nil || number < s.failed {
			s.fault, s.failed = faultOf(err, file), number
		}
		return false
	}
	for i := range d.blocks {
		d.blocks[i].file = int32(file)
	}
	if len(d.blocks) > 0 {
		s.found = append(s.found, unitBlocks{number, slices.Clone(d.blocks), slices.Clone(d.starts)})
	}
	return true
}

// done reports whether the scan has ended on all ranks; ended says that it has on this one. Ranks
// above a rank that has found a fault stop. Collective.
func (s *scan) done(ended bool) (bool, error) {
	const running, faulty = 1, 2
	state := []byte{0}
	s.mu.Lock()
	if !ended {
		state[0] |= running
	}
	if s.fault != nil {
		state[0] |= faulty
	}
	s.mu.Unlock()
	all, err := s.gather(state)
	if err != nil {
		s.stop()
		return false, err
	}
	rank, _ := s.rank()
	done := true
	for r, b := range all {
		done = done && b[0]&running == 0
		if b[0]&faulty != 0 && rank > int64(r) {
			s.stop()
		}
	}
	return done, nil
}

// gatherBlocks returns the blocks of all ranks in the order of the files, or the error of the first
// fault. Collective.
func (s *scan) gatherBlocks() ([]foundBlock, []uint32, error) {
	slices.SortFunc(s.found, func(a, b unitBlocks) int { return int(a.number - b.number) })
	var own []foundBlock
	var ownStarts []uint32
	for _, u := range s.found {
		if s.fault == nil || u.number < s.failed {
			own, ownStarts = append(own, u.blocks...), append(ownStarts, u.starts...)
		}
	}
	s.found = nil
	text, _ := json.Marshal(s.fault)
	faults, err := s.gather(text)
	if err != nil {
		return nil, nil, err
	}
	blocks, err := s.gather(bytesOf(own))
	if err != nil {
		return nil, nil, err
	}
	starts, err := s.gatherStarts(ownStarts)
	if err != nil {
		return nil, nil, err
	}
	var all []foundBlock
	for r, b := range blocks {
		all = append(all, blocksOf(b)...)
		var f *fault
		if err := json.Unmarshal(faults[r], &f); err != nil {
			return nil, nil,
				status.Errorf(status.Internal, "data.Open: the error of rank %d cannot be decoded: %w", r, err)
		}
		if f == nil {
			continue
		}
		lines, docs := int64(0), int64(0)
		for _, x := range all {
			docs += x.doc
			if int(x.file) == f.File {
				lines += x.lines
			}
		}
		err := f.located(s.files[f.File].path(), lines, docs)
		if f.Code != status.IO {
			return nil, nil, err
		}
		if rank, _ := s.rank(); rank != int64(r) {
			err = nil
		}
		return nil, nil, s.agreeOnFiles(err)
	}
	return all, starts, nil
}

// gatherStarts returns the starts of documents that all ranks have found; nil if they are not
// needed. Collective.
func (s *scan) gatherStarts(own []uint32) ([]uint32, error) {
	if !s.config.needsStarts() {
		return nil, nil
	}
	b := make([]byte, 0, 4*len(own))
	for _, x := range own {
		b = binary.LittleEndian.AppendUint32(b, x)
	}
	all, err := s.gather(b)
	if err != nil {
		return nil, err
	}
	starts := []uint32{}
	for _, b := range all {
		for ; len(b) > 0; b = b[4:] {
			starts = append(starts, binary.LittleEndian.Uint32(b))
		}
	}
	return starts, nil
}

// bytesOf and blocksOf convert blocks to and from bytes in the layout of this machine's memory. All
// ranks run the same program.
func bytesOf(blocks []foundBlock) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(blocks))), len(blocks)*int(unsafe.Sizeof(foundBlock{})))
}

func blocksOf(b []byte) []foundBlock {
	blocks := make([]foundBlock, len(b)/int(unsafe.Sizeof(foundBlock{})))
	copy(bytesOf(blocks), b)
	return blocks
}
