package comm

import (
	"strings"
	"testing"

	"ulysses/internal/status"
)

// SetLevels chooses two levels where many messages between nodes cost more than two copies, on all
// ranks alike, and refuses what is not possible.
func TestSetLevels(t *testing.T) {
	// 5 us of overhead a message, 1 GB/s between nodes, 4 GB/s inside
	links := Links{Inside: Link{1e-6, 0, 4e9}, Between: Link{1e-6, 5e-6, 1e9}, CopyBandwidth: 8e9}
	for _, x := range []struct {
		nodes []int
		how   string
		bytes int64
		two   bool
		says  string
		code  status.Code
	}{
		{[]int{0, 0, 0, 0, 1, 1, 1, 1}, "auto", 1 << 10, true, "two levels, over 2 nodes of 4 ranks: by the model",
			status.OK},
		{[]int{0, 0, 0, 0, 1, 1, 1, 1}, "auto", 1 << 20, false, "direct all-to-alls: by the model of the links",
			status.OK},
		{[]int{0, 0, 0, 0, 1, 1, 1, 1}, "off", 1 << 10, false, "", status.OK},
		{[]int{0, 0, 0, 0, 1, 1, 1, 1}, "on", 1 << 20, true,
			"two levels, over 2 nodes of 4 ranks: parallel.two_level = \"on\"", status.OK},
		{[]int{0, 0, 0, 0, 0, 0, 0, 0}, "on", 1 << 10, false, "parallel.two_level = \"on\" has no effect", status.OK},
		{[]int{0, 1, 2, 3, 4, 5, 6, 7}, "on", 1 << 10, false, "parallel.two_level = \"on\" has no effect", status.OK},
		{nil, "auto", 1 << 10, false, "", status.OK},
		{[]int{0, 1, 2, 3, 4, 5, 6, 7}, "auto", 1, false, "", status.OK},
		{[]int{0, 0, 0, 0, 0, 1, 1, 1}, "auto", 1 << 10, false, "", status.OK},
		{[]int{0, 0, 0, 0, 0, 1, 1, 1}, "on", 1 << 10, false, "different numbers of ranks", status.Unsupported},
	} {
		err := RunLocal(8, func(c Comm) error {
			m, err := NewMesh(c, 8, 1, nil, nil, nil)
			if err != nil {
				return err
			}
			m.Nodes, m.Links = x.nodes, links
			says, err := m.SetLevels(x.how, x.bytes)
			if err != nil {
				says = err.Error()
			}
			if (m.TwoLevel() != nil) != x.two || !strings.Contains(says, x.says) || (x.says == "") != (says == "") ||
				status.Of(err) != x.code {
				return wrong("%v %s %d: two levels %v, %q, %v", x.nodes, x.how, x.bytes, m.TwoLevel() != nil, says, err)
			}
			if again, err := m.SetLevels(x.how, x.bytes); x.two && (again != "" || err != nil) {
				return wrong("a second call: %q, %v", again, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
