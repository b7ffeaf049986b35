package main

import (
	"io"
	"os"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// The suite overlap runs over slow links and prints all four ways. Links without a latency or a
// bandwidth are refused.
func TestOverlap(t *testing.T) {
	links := []string{"--ranks", "2", "--threads", "1", "--link-latency", "10us", "--link-bandwidth", "1e9"}
	text := printed(t, append([]string{"overlap", "--cases", "65536", "--repeat", "2"}, links...)...)
	for _, way := range []string{"computation", "communication", "in turn", "overlapped"} {
		if strings.Count(text, `"case":"`+way+`"`) != 1 {
			t.Errorf("no line of %q in:\n%s", way, text)
		}
	}
	text = printed(t, append([]string{"layer_overlap", "--repeat", "1"}, links...)...)
	for _, way := range []string{"plain", "overlapped"} {
		if strings.Count(text, `"case":"`+way+`"`) != 1 {
			t.Errorf("no line of %q in:\n%s", way, text)
		}
	}
	for _, flags := range [][]string{{"--link-latency", "10us"}, {"--link-bandwidth", "1e9"},
		{"--link-bandwidth", "-1", "--link-latency", "1us"}} {
		if err := run(append([]string{"overlap"}, flags...)); status.Of(err) != status.InvalidArgument {
			t.Errorf("%v: %v", flags, err)
		}
	}
}

// printed runs a suite and returns what it prints.
func printed(t *testing.T, args ...string) string {
	t.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout := os.Stdout
	os.Stdout = write
	err = run(args)
	os.Stdout = stdout
	write.Close()
	text, _ := io.ReadAll(read)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The suite levels runs on virtual nodes and prints both ways, with the time of the model.
func TestLevels(t *testing.T) {
	text := printed(t, "levels", "--ranks", "4", "--nodes", "2", "--cases", "65536", "--repeat", "2", "--link-latency",
		"10us", "--link-bandwidth", "1e9")
	for _, part := range []string{`"between_messages":2`, `"case":"direct"`, `"between_messages":1`,
		`"case":"two levels"`} {
		if strings.Count(text, part) != 1 {
			t.Errorf("not one %s in:\n%s", part, text)
		}
	}
	for _, flags := range [][]string{{"--nodes", "3", "--ranks", "4"}, {"--nodes", "2", "--ranks", "4"},
		{"--nodes", "0"}} {
		if err := run(append([]string{"levels"}, flags...)); status.Of(err) != status.InvalidArgument {
			t.Errorf("%v: %v", flags, err)
		}
	}
}
