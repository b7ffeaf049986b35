package outdir

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// Token is a file that one process writes into a folder and that others look for.
type Token struct{ Host, Name, Text string }

// lookFor is how long a process looks for the file: a network file system shows a new file on other
// nodes with a delay.
const lookFor = 3 * time.Second

// WriteToken creates the file in a folder, under a random name. host is this machine's name, for
// messages.
func WriteToken(dir, host string) (t Token, err error) {
	t = Token{Host: host, Name: ".shared." + rand.Text(), Text: rand.Text()}
	return t, os.WriteFile(filepath.Join(dir, t.Name), []byte(t.Text), 0o666)
}

// Remove removes the file.
func (t *Token) Remove(dir string) {
	if t.Name != "" {
		os.Remove(filepath.Join(dir, t.Name))
	}
}

// See looks for the file of rank 0 and opens it for writing. who names this process in the error,
// as in "rank 2 on n2".
func (t *Token) See(dir, who string) error {
	var text []byte
	var err error
	for end := time.Now().Add(lookFor); ; time.Sleep(lookFor / 30) {
		if text, err = os.ReadFile(filepath.Join(dir, t.Name)); err == nil && string(text) == t.Text {
			break
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf(
				"%s cannot read a file of rank 0 on %s: %w; choose a folder that all nodes may read and write", who,
				t.Host, err)
		}
		if time.Now().After(end) {
			return fmt.Errorf(
				"%s is not shared: %s does not see a file of rank 0 on %s; choose a folder on a shared file system",
				dir, who, t.Host)
		}
		_, _ = os.ReadDir(dir) // reading the folder makes NFS fetch it from the server
	}
	f, err := os.OpenFile(filepath.Join(dir, t.Name), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("%s cannot write into it: %w; choose a folder that all nodes may read and write", who, err)
	}
	return f.Close()
}
