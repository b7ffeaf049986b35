package job

import (
	"fmt"
	"strings"
	"testing"
)

// A packed batch of conversations has PyTorch's masked losses, gradient norms and weights on every
// mesh: sequences over ranks by heads and in a ring, replicas, and shards of every stage.
func TestConversationsOnEveryMesh(t *testing.T) {
	for dir, c := range namedGoldens(t, "llama-sgd-chat-dp2", "qwen3-adamw-chat-packed") {
		for _, mesh := range []struct{ ranks, ulysses, ring, zero int }{
			{1, 1, 1, 0}, {2, 2, 1, 0}, {2, 1, 1, 3}, {2, 1, 2, 1}, {4, 4, 1, 2}, {4, 2, 2, 0}, {4, 2, 1, 3},
		} {
			t.Run(fmt.Sprintf("%s/%+v", c.Name, mesh), func(t *testing.T) {
				sets := []string{fmt.Sprintf("parallel.ulysses=%d", mesh.ulysses),
					fmt.Sprintf("parallel.ring=%d", mesh.ring), fmt.Sprintf("parallel.zero=%d", mesh.zero),
					"data.accumulate=1", "data.global_batch=2"}
				if log := trainGolden(t, dir, c, mesh.ranks, sets...); strings.Contains(log, "WRN") {
					t.Log(log)
				}
			})
		}
	}
}
