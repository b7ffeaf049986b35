package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// eosFields are the fields of the files beside tokenizer.json that name the end of a document: a
// token as text or as an object with content, or one or several ids.
type eosFields struct {
	Token json.RawMessage `json:"eos_token"`
	ID    json.RawMessage `json:"eos_token_id"`
	Text  *struct {
		ID json.RawMessage `json:"eos_token_id"`
	} `json:"text_config"`
}

// findEOS returns the id that ends a document, -1 for none, and the paths of the files that it
// read. It takes the first token or id that these files of a folder name: tokenizer_config.json,
// special_tokens_map.json, generation_config.json, config.json. A token or id that the tokenizer
// does not have is an error, because without a mark documents would be joined unnoticed. lookup
// returns the id of a token; ids are less than size.
func findEOS(folder string, lookup func(token string) (id int32, ok bool), size int64) (eos int32, files []string,
	err error) {
	for _, name := range []string{"tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
		"config.json"} {
		path := filepath.Join(folder, name)
		text, err := input.Read(path, input.MaxConfig)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return -1, nil, status.Errorf(status.IO, "the end of a document: %w", err)
		}
		files = append(files, path)
		var s eosFields
		if err := input.JSON(input.TrimBOM(text), &s); err != nil {
			return -1, nil, status.Errorf(status.InvalidConfig, "the end of a document: %s: %w", path, err)
		}
		if s.Text != nil && !isSet(s.ID) {
			s.ID = s.Text.ID
		}
		if isSet(s.Token) {
			eos, err = eosOfToken(path, s.Token, lookup)
			return eos, files, err
		}
		if isSet(s.ID) {
			eos, err = eosOfID(path, s.ID, size)
			return eos, files, err
		}
	}
	return -1, files, nil
}

// isSet reports whether a field is there, and is neither null nor an empty list or string. A list
// may have white space between its brackets.
func isSet(raw json.RawMessage) bool {
	var list []json.RawMessage
	return len(raw) > 0 && !bytes.Equal(raw, []byte("null")) && !bytes.Equal(raw, []byte(`""`)) &&
		(json.Unmarshal(raw, &list) != nil || len(list) > 0)
}

func eosOfToken(path string, raw json.RawMessage, lookup func(string) (int32, bool)) (int32, error) {
	var token string
	if json.Unmarshal(raw, &token) != nil {
		var object struct {
			Content string `json:"content"`
		}
		if err := input.JSON(raw, &object); err != nil {
			return -1, status.Errorf(status.InvalidConfig,
				"%s: eos_token is neither a string nor an object with content: %w", path, err)
		}
		token = object.Content
	}
	id, ok := lookup(token)
	if !ok {
		return -1, status.Errorf(status.InvalidConfig,
			"%s: the tokenizer does not have the eos_token %s; set eos_token to a token of the tokenizer", path,
			input.Quote(token))
	}
	return id, nil
}

func eosOfID(path string, raw json.RawMessage, size int64) (int32, error) {
	var ids []int64
	var id int64
	if json.Unmarshal(raw, &ids) == nil { // it is not empty (isSet)
		id = ids[0]
	} else if err := input.JSON(raw, &id); err != nil {
		return -1, status.Errorf(status.InvalidConfig, "%s: eos_token_id is neither a number nor a list of numbers: %w",
			path, err)
	}
	if id < 0 || id >= size {
		return -1, status.Errorf(status.InvalidConfig,
			"%s: eos_token_id is %d, the tokenizer has the ids 0 to %d; set eos_token_id to one of them", path,
			id, size-1)
	}
	return int32(id), nil
}
