// Package tfevents writes scalars as event files, which TensorBoard reads.
//
// Create makes a file in a folder, and File.Scalars appends the values of a step. A file is a
// sequence of records: length, masked CRC-32C of the length, data, masked CRC-32C of the data
// (TFRecord). The data are protocol buffers of the message Event
// (tensorflow/core/util/event.proto).
package tfevents

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"ulysses/internal/status"
)

// File is an event file that is written. A nil *File writes nothing.
type File struct {
	f     *os.File
	event []byte
	frame []byte
}

// Pattern is the pattern of the names of event files.
const Pattern = "events.out.tfevents.*"

// Create makes a new file in a folder, which it creates if it does not exist. Readers drop the
// values of steps from `from` on that other files of the folder have, because the run repeats them.
func Create(dir string, now time.Time, from int64) (*File, error) {
	if err := os.Mkdir(dir, 0o777); err != nil && !os.IsExist(err) {
		return nil, status.Errorf(status.IO, "tensorboard: %w; choose another output.dir", err)
	}
	host, _ := os.Hostname()
	var f *os.File
	for n := 0; f == nil; n++ { // a process may create several files in a second
		path := filepath.Join(dir, fmt.Sprintf("events.out.tfevents.%010d.%s.%d.%d", now.Unix(), host, os.Getpid(), n))
		var err error
		f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY|os.O_APPEND, 0o666)
		if err != nil && !os.IsExist(err) {
			return nil, status.Errorf(status.IO, "tensorboard: %w; choose another output.dir", err)
		}
	}
	x := &File{f: f}
	x.begin(now, 0)
	x.event = appendBytes(x.event, 3, []byte("brain.Event:2")) // file_version
	err := x.write()
	if err == nil && from > 0 {
		x.begin(now, from)
		x.event = appendBytes(x.event, 7, []byte{1 << 3, 1}) // session_log: status START
		err = x.write()
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return x, nil
}

// Scalars appends the values of a step, by tag, in the order of the tags.
func (x *File) Scalars(now time.Time, step int64, values map[string]float64) error {
	if x == nil {
		return nil
	}
	var summary []byte
	for _, tag := range slices.Sorted(maps.Keys(values)) {
		value := appendBytes(nil, 1, []byte(tag))
		value = append(value, 2<<3|5) // simple_value, a float
		value = binary.LittleEndian.AppendUint32(value, math.Float32bits(float32(values[tag])))
		summary = appendBytes(summary, 1, value)
	}
	x.begin(now, step)
	x.event = appendBytes(x.event, 5, summary)
	return x.write()
}

// begin starts an event with its time and step.
func (x *File) begin(now time.Time, step int64) {
	x.event = append(x.event[:0], 1<<3|1) // wall_time, a double
	x.event = binary.LittleEndian.AppendUint64(x.event, math.Float64bits(float64(now.UnixNano())/1e9))
	if step != 0 {
		x.event = binary.AppendUvarint(append(x.event, 2<<3), uint64(step))
	}
}

// appendBytes appends a field of bytes.
func appendBytes(to []byte, field byte, data []byte) []byte {
	to = binary.AppendUvarint(append(to, field<<3|2), uint64(len(data)))
	return append(to, data...)
}

// write appends the event as one record.
func (x *File) write() error {
	r := binary.LittleEndian.AppendUint64(x.frame[:0], uint64(len(x.event)))
	r = binary.LittleEndian.AppendUint32(r, masked(r))
	r = append(r, x.event...)
	x.frame = binary.LittleEndian.AppendUint32(r, masked(x.event))
	if _, err := x.f.Write(x.frame); err != nil {
		return status.Errorf(status.IO, "tensorboard: %w", err)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func masked(data []byte) uint32 {
	c := crc32.Checksum(data, castagnoli)
	return (c>>15 | c<<17) + 0xa282ead8
}

// Close closes the file.
func (x *File) Close() error {
	if x == nil {
		return nil
	}
	return x.f.Close()
}
