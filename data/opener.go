package data

import (
	"encoding/json"
	"os"

	"ulysses/comm"
	"ulysses/data/chat"
	"ulysses/internal/status"
)

// Options are the arguments of Open that are not in the job file's tables [data] and [eval].
type Options struct {
	Vocab     int64     // size of the model's vocabulary
	Seed      uint64    // of the training order, if data.shuffle is set
	Tokenizer Tokenizer // nil = as data.tokenizer says
	Comm      comm.Comm // the ranks that share the scan of the files; nil = this rank alone
	Workers   int       // goroutines of this rank that scan; 0 = one

	// for tests: bytes of a block, of the cache of blocks, and of a line; 0 = the default
	block, cache, line int64
}

// opener has the arguments of a call of Open.
type opener struct {
	Options
	config Config
	chat   *chat.Reader
	// expanded has the temporary files with the content of compressed and Parquet files, by path
	expanded map[string]*os.File
}

// rank returns this rank and the number of ranks.
func (o *opener) rank() (rank, size int64) {
	if o.Comm == nil {
		return 0, 1
	}
	return int64(o.Comm.Rank()), int64(o.Comm.Size())
}

// agreeOnFiles returns an error on all ranks if a rank cannot open or read its files. The error
// names the rank, because other ranks may read these files on their machines. Collective.
func (o *opener) agreeOnFiles(err error) error {
	if o.Comm == nil {
		return err
	}
	return comm.Agree(o.Comm, err)
}

// agree returns, on all ranks, the error of the lowest rank that has one. Collective.
func (o *opener) agree(err error) error {
	if o.Comm == nil {
		return err
	}
	var own []byte
	if err != nil {
		own, _ = json.Marshal(fault{Line: none, Doc: none, Code: status.Of(err), Text: err.Error()})
	}
	all, e := comm.GatherBytes(o.Comm, own)
	if e != nil {
		return e
	}
	for _, b := range all {
		if len(b) == 0 {
			continue
		}
		var f fault
		if e := json.Unmarshal(b, &f); e != nil {
			return status.Errorf(status.Internal, "data.Open: the error of another rank cannot be decoded: %w", e)
		}
		return f.located("", 0, 0)
	}
	return nil
}

// gather returns the bytes of all ranks, by rank. Collective.
func (o *opener) gather(own []byte) ([][]byte, error) {
	if o.Comm == nil {
		return [][]byte{own}, nil
	}
	return comm.GatherBytes(o.Comm, own)
}

func (o *opener) decoder() *decoder {
	var begin []int32
	if o.Tokenizer != nil && o.config.AddBOS {
		begin = o.Tokenizer.Begin()
	}
	return &decoder{begin: begin, tokenizer: o.Tokenizer, chat: o.chat, expanded: o.expanded, addEOS: o.config.AddEOS,
		keepStarts: o.config.needsStarts(), vocab: o.Vocab, sequence: o.config.Sequence}
}
