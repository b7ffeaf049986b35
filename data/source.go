package data

// source is a list of sequences from files of one kind: a documentRange, its documents packed in
// another way (packedRange), or a tokenFile.
type source interface {
	// documents returns the number of documents that eval.split counts. Each sequence of a
	// .safetensors file counts as one document.
	documents() int64
	sequences() int64
	tokens() int64
	cut() int64       // tokens of the documents that no sequence has
	longest() int64   // tokens of the longest sequence
	checksum() uint32 // of the whole files, also where the source has only some of their sequences
	length(sequence int64) (int64, error)
	appendSequence(m *MicroBatch, sequence int64) error
	// split returns the documents before the given one, and the others.
	split(document int64) (before, after source, _ error)
	// splitDocument splits a source of one document of n tokens: the head has at(n) tokens.
	splitDocument(at func(n int64) int64) (head, tail source, _ error)
}
