package tokenizer

import (
	"errors"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	"ulysses/internal/input"
	"ulysses/internal/status"
)

// checkConfig returns an error if added_tokens_decoder of a folder's tokenizer_config.json has a
// token that the tokenizer does not have. transformers adds it when it opens the folder, so its ids
// would differ from the ids here in every text with the token. In folders that transformers has
// written, tokenizer.json has all tokens.
func checkConfig(folder string, has func(token string) bool) error {
	path := filepath.Join(folder, "tokenizer_config.json")
	text, err := input.Read(path, input.MaxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return status.Errorf(status.IO, "added tokens: %w", err)
	}
	var c struct {
		Added map[string]addedToken `json:"added_tokens_decoder"`
	}
	if err := input.JSON(input.TrimBOM(text), &c); err != nil {
		return status.Errorf(status.InvalidConfig, "added tokens: %s: %w", path, err)
	}
	for _, id := range slices.Sorted(maps.Keys(c.Added)) {
		token := c.Added[id].Content
		if !has(token) {
			return status.Errorf(status.InvalidConfig,
				"%s: added_tokens_decoder has %s, and tokenizer.json does not; write both with AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers",
				path, input.Quote(token))
		}
	}
	return nil
}
