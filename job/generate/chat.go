package generate

import (
	"time"

	"ulysses/data/chat"
	"ulysses/internal/status"
	"ulysses/model"
)

// Asked returns what the chat template of a model folder makes of a prompt: of the words of a user,
// or of a conversation in JSON.
func Asked(folder string, prompt []byte) ([]byte, error) {
	if _, err := model.ReadConfig(folder, nil); err != nil { // a folder without a model has no template either
		return nil, err
	}
	r, err := chat.Open(chat.Options{Template: folder, Folder: folder, TrainOn: chat.All,
		Date: time.Now().Format(time.DateOnly)})
	if err != nil {
		return nil, status.Errorf(status.Of(err), "generate: %w", err)
	}
	if !r.HasTemplates() {
		return nil, status.Errorf(status.InvalidConfig,
			"generate: %s has neither chat_template.jinja nor a chat_template in tokenizer_config.json; leave out --chat",
			folder)
	}
	text, err := r.Ask(prompt)
	if err != nil {
		return nil, status.Errorf(status.InvalidArgument, "generate: --chat: %w", err)
	}
	return text, nil
}
