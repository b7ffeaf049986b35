package units

import "testing"

func TestDuration(t *testing.T) {
	for seconds, want := range map[float64]string{
		0.4:  "0s",
		7384: "2h3m4s",
		3e9:  "833333h20m0s",
		1e10: "317 years", // more than a time.Duration holds
		1e18: "31.7G years",
	} {
		if s := Duration(seconds); s != want {
			t.Errorf("%v s: %q, want %q", seconds, s, want)
		}
	}
}
