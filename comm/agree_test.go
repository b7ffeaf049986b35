package comm

import "testing"

// Ranks on several hosts are named with their host.
func TestPlace(t *testing.T) {
	for _, x := range []struct {
		rank  int
		hosts []string
		want  string
	}{
		{0, []string{"a"}, "rank 0"},
		{1, []string{"a", "a", "a"}, "rank 1"},
		{1, []string{"a", "a", "b"}, "rank 1 on a"},
		{2, []string{"a", "a", "b"}, "rank 2 on b"},
	} {
		var hosts [][]byte
		for _, host := range x.hosts {
			hosts = append(hosts, []byte(host))
		}
		if got := place(x.rank, hosts); got != x.want {
			t.Errorf("%v: %q, want %q", x.hosts, got, x.want)
		}
	}
}
