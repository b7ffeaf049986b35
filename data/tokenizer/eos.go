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

// special is the part of the files beside tokenizer.json that names the end of a document: a token
// as text or as an object with content, or an id or several.
type special struct {
	Token json.RawMessage `json:"eos_token"`
	ID    json.RawMessage `json:"eos_token_id"`
	Text  *struct {
		ID json.RawMessage `json:"eos_token_id"`
	} `json:"text_config"`
}

// findEOS looks in the files of a folder, in this order; the first that names a token holds. A name
// or an id that the tokenizer does not have is an error: documents would run into each other
// unseen.
func (t *Tokenizer) findEOS(folder string) (int32, error) {
	for _, name := range []string{"tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"} {
		path := filepath.Join(folder, name)
		text, err := input.Read(path, input.MaxConfig)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return -1, status.Errorf(status.IO, "the end of a document: %w", err)
		}
		t.files = append(t.files, path)
		var s special
		if err := input.JSON(input.TrimBOM(text), &s); err != nil {
			return -1, status.Errorf(status.InvalidConfig, "the end of a document: %s: %w", path, err)
		}
		if s.Text != nil && !said(s.ID) {
			s.ID = s.Text.ID
		}
		if said(s.Token) {
			return t.eosOfToken(path, s.Token)
		}
		if said(s.ID) {
			return t.eosOfID(path, s.ID)
		}
	}
	return -1, nil
}

func said(raw json.RawMessage) bool {
	return len(raw) > 0 && !bytes.Equal(raw, []byte("null")) && !bytes.Equal(raw, []byte("[]")) && !bytes.Equal(raw, []byte(`""`))
}

func (t *Tokenizer) eosOfToken(path string, raw json.RawMessage) (int32, error) {
	var token string
	if json.Unmarshal(raw, &token) != nil {
		var object struct {
			Content string `json:"content"`
		}
		if err := input.JSON(raw, &object); err != nil {
			return -1, status.Errorf(status.InvalidConfig, "%s: eos_token is neither a text nor an added token: %w", path, err)
		}
		token = object.Content
	}
	id, ok := t.added.ids[token]
	if !ok {
		for i, s := range t.model.names {
			if s == token {
				id, ok = i, true
			}
		}
	}
	if !ok {
		return -1, status.Errorf(status.InvalidConfig, "%s: eos_token is %s, which the tokenizer does not have: name one that it has, or null", path, input.Quote(token))
	}
	return id, nil
}

func (t *Tokenizer) eosOfID(path string, raw json.RawMessage) (int32, error) {
	var ids []int64
	var id int64
	if json.Unmarshal(raw, &ids) == nil {
		id = ids[0]
	} else if err := input.JSON(raw, &id); err != nil {
		return -1, status.Errorf(status.InvalidConfig, "%s: eos_token_id is neither a number nor a list of numbers: %w", path, err)
	}
	if id < 0 || id >= t.size {
		return -1, status.Errorf(status.InvalidConfig, "%s: eos_token_id is %d, and the tokenizer's ids are 0 to %d: set it to one of these, or name eos_token in tokenizer_config.json", path, id, t.size-1)
	}
	return int32(id), nil
}
