package job

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/job/plan"
)

// sleepy is a test device whose matrix products take longer.
type sleepy struct {
	device.Device
	each time.Duration
}

func (d sleepy) Gemm(s device.Stream, a *device.Gemm) error {
	time.Sleep(d.each)
	return d.Device.Gemm(s, a)
}

// A run whose second rank is many times slower than the first names that rank at its end and in the
// report.
func TestRunNamesTheSlowRank(t *testing.T) {
	peak, all := plan.MeasurePeakAfter, plan.MeasureAllAfter
	plan.MeasurePeakAfter, plan.MeasureAllAfter = 0, 0
	defer func() { plan.MeasurePeakAfter, plan.MeasureAllAfter = peak, all }()
	path := planned(t, "llama")
	var out, log bytes.Buffer
	err := Run(Options{Path: path, Ranks: 2, Stdout: &out, Stderr: &log, open: opener{
		device: func(c backends.Choice) (device.Device, string, error) {
			d, why, err := backends.Open(c)
			if err == nil && c.LocalRank == 1 {
				d = sleepy{d, 10 * time.Millisecond}
			}
			return d, why, err
		},
		comm: func(_ device.Device, host comm.Comm, _ string) (comm.Comm, string, error) { return host, "", nil },
	}})
	if err != nil {
		t.Fatal(err, log.String())
	}
	said := ""
	for line := range strings.SplitSeq(log.String(), "\n") {
		if strings.Contains(line, "WRN") && strings.Contains(line, "times its plan") {
			said += line
		}
	}
	const want = "the others waited for rank 1 on "
	page, err := os.ReadFile(filepath.Join(filepath.Dir(path), "report.html"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(said, "a step took ") != 1 || !strings.Contains(said, want) ||
		!strings.Contains(string(page), want) || !strings.Contains(out.String(), "by a plan made now") {
		t.Errorf("%q\n%s\n%s", said, out.String(), log.String())
	}
}
