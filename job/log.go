package job

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"sync"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"
	"golang.org/x/sys/unix"

	"ulysses/internal/units"
	"ulysses/job/file"
)

// logForms are the values of --log. auto is console.
var logForms = []string{"auto", "console", "json"}

// screen is the writer of log lines. If a progress bar is drawn there, screen clears the bar before
// it writes a line.
type screen struct {
	mu    sync.Mutex
	to    io.Writer
	clear func() // nil = there is no bar
}

func (s *screen) Write(line []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clear != nil {
		s.clear()
	}
	if _, err := s.to.Write([]byte(file.WithoutLogins(string(line)))); err != nil {
		return 0, err
	}
	return len(line), nil
}

// underBar sets the function that clears the bar; nil = there is no bar.
func (s *screen) underBar(clear func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clear = clear
}

// logger returns a rank's log. Rank 0 writes everything; the other ranks write only errors. A JSON
// line has the fields rank and host; a console line names them only in warnings and errors.
func (o *Options) logger(w *screen, rank int, host string) zerolog.Logger {
	level := zerolog.InfoLevel
	switch {
	case rank > 0:
		level = zerolog.ErrorLevel
	case o.Quiet:
		level = zerolog.WarnLevel
	}
	var out io.Writer = w
	if o.log != "json" {
		out = zerolog.ConsoleWriter{Out: w, TimeFormat: "15:04:05", NoColor: !isTerminal(w.to) ||
			os.Getenv("NO_COLOR") != "", FieldsExclude: []string{"rank", "host"},
			FieldsOrder:   []string{"step", "of", "loss", "grad_norm", "lr", "tokens_per_second", "left"},
			FormatPrepare: forReaders}
	}
	return zerolog.New(out).Level(level).With().Timestamp().Int("rank", rank).Str("host", host).Logger()
}

// rootLog returns the log of rank 0 for a command that has no ranks, or not yet.
func (o *Options) rootLog() zerolog.Logger {
	host, _ := os.Hostname()
	return o.logger(&screen{to: o.Stderr}, 0, host)
}

// warn writes a warning to rootLog.
func (o *Options) warn(text string) {
	log := o.rootLog()
	log.Warn().Msg(text)
}

var namesARank = regexp.MustCompile(`^rank \d+\b`)

// forReaders rounds the numbers of a console line and puts rank and host before an error. JSON
// lines have unrounded numbers.
func forReaders(line map[string]any) error {
	for name, form := range map[string]func(x float64) string{
		"loss": units.Number, "eval_loss": units.Number, "perplexity": func(x float64) string {
			return fmt.Sprintf("%.2f", x)
		}, "grad_norm": func(x float64) string { return fmt.Sprintf("%.3f", x) },
		"lr": func(x float64) string { return fmt.Sprintf("%.3g", x) }, "tokens_per_second": units.Short,
	} {
		if n, ok := line[name].(interface{ Float64() (float64, error) }); ok {
			if x, err := n.Float64(); err == nil {
				line[name] = form(x)
			}
		}
	}
	for name, value := range line { // of an evaluation set
		n, ok := value.(interface{ Float64() (float64, error) })
		if ok && strings.HasPrefix(name, "eval_") && strings.HasSuffix(name, "_loss") {
			if x, err := n.Float64(); err == nil {
				line[name] = units.Number(x)
			}
		}
	}
	if n, ok := line["seconds_left"].(interface{ Float64() (float64, error) }); ok {
		x, _ := n.Float64()
		line["left"] = units.Duration(x)
		delete(line, "seconds_left")
	}
	message, _ := line[zerolog.MessageFieldName].(string)
	if line[zerolog.LevelFieldName] == zerolog.ErrorLevel.String() && !namesARank.MatchString(message) {
		line[zerolog.MessageFieldName] = fmt.Sprintf("rank %v on %v: %s", line["rank"], line["host"], message)
	}
	return nil
}

// isTerminal reports whether w is a terminal that understands colours. Under mpirun and srun a
// rank's standard error is a pipe, even if the launcher writes to a terminal. TERM=dumb says that a
// terminal shows escape sequences as text, as that of an editor does.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && os.Getenv("TERM") != "dumb" && isatty.IsTerminal(f.Fd())
}

// barWidth is the width of a progress bar with its numbers. In a narrower terminal, each update
// would begin a new line.
const barWidth = 60

// hasBar reports whether w is a terminal with room for a progress bar. A terminal that does not
// tell its width has 0 columns.
func hasBar(w io.Writer) bool {
	if !isTerminal(w) {
		return false
	}
	size, err := unix.IoctlGetWinsize(int(w.(*os.File).Fd()), unix.TIOCGWINSZ)
	return err != nil || size.Col == 0 || size.Col >= barWidth
}
