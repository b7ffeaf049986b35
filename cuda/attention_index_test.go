package cuda

import "testing"

// TestAttentionIndex holds masks, tiles and workspaces of attention against their definitions.
func TestAttentionIndex(t *testing.T) { hostProgram(t, "kernels/attention_index_test.cpp") }
