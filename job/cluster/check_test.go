package cluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// subject returns what a rank contributes if nothing is wrong: two ranks a node.
func subject(t *testing.T, dir string, rank int) *Subject {
	t.Helper()
	return &Subject{Host: fmt.Sprintf("n%d", rank/2+1), LocalRank: rank % 2, Version: "v1",
		Program: filepath.Join(dir, "program"), JobFile: []byte("seed = 1"),
		Files:  []Files{{Key: "data.path", List: []comm.File{{Name: "a.txt", Path: filepath.Join(dir, "a.txt")}}}},
		Output: filepath.Join(dir, "out", "run"),
		Open: func() (device.Device, tensor.DType, error) {
			d, _, err := backends.Open(backends.Choice{Backend: "cpu", Threads: 1})
			return d, tensor.F32, err
		}}
}

// check runs Check on goroutine ranks, with subjects that spoil changes. Findings about speed
// depend on the machine and are left out.
func check(t *testing.T, ranks int, spoil func(rank int, s *Subject)) *Report {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"program", "a.txt"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	reports := make([]*Report, ranks)
	err := comm.RunLocal(ranks, func(c comm.Comm) error {
		s := subject(t, dir, c.Rank())
		if spoil != nil {
			spoil(c.Rank(), s)
		}
		r, err := Check(c, s)
		mu.Lock()
		defer mu.Unlock()
		reports[c.Rank()] = r
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range reports {
		kept := []Finding{}
		for _, f := range r.Findings {
			if !strings.HasPrefix(f.What, "slow ") {
				kept = append(kept, f)
			}
		}
		r.Findings = kept
		if fmt.Sprint(kept) != fmt.Sprint(reports[0].Findings) {
			t.Errorf("ranks have different findings: %v and %v", kept, reports[0].Findings)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".shared.*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := os.Stat(filepath.Join(dir, "out")); err == nil {
		t.Error("the check has made output.dir")
	}
	return reports[0]
}

// withBF16 is a CPU that also has kernels for BF16.
type withBF16 struct{ device.Device }

func (d withBF16) Info() device.Info {
	info := d.Device.Info()
	info.Kernels = strings.TrimSuffix(info.Kernels, "bf16") + "bf16"
	return info
}

// The table names the kernels as a run does. In F32, kernels for BF16 make no difference.
func TestKernelNames(t *testing.T) {
	r := check(t, 2, func(rank int, s *Subject) {
		open := s.Open
		s.Open = func() (device.Device, tensor.DType, error) {
			d, dtype, err := open()
			return withBF16{d}, dtype, err
		}
	})
	var out strings.Builder
	if err := r.Print(&out); err != nil || !strings.HasSuffix(r.Ranks[0].Kernels, "bf16") ||
		!strings.Contains(out.String(), r.Ranks[0].Kernels) {
		t.Errorf("%v, not bf16:\n%s", err, out.String())
	}
	for dtype, want := range map[tensor.DType]int{tensor.F32: 0, tensor.BF16: 1} {
		for i := range r.Ranks {
			r.Ranks[i].Compute = dtype
		}
		r.Ranks[1].Kernels = strings.TrimSuffix(r.Ranks[0].Kernels, "bf16")
		if found := compare(r.Ranks); len(found) != want {
			t.Errorf("%v: %v", dtype, found)
		}
	}
}

func TestClusterCheck(t *testing.T) {
	other := t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "a.txt"), []byte("a.tyt"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		spoil func(rank int, s *Subject)
		want  string // "" = no finding
		code  status.Code
	}{
		{"well", nil, "", status.OK},
		{"job file", func(rank int, s *Subject) {
			if rank == 3 {
				s.JobFile = []byte("seed = 2")
			}
		}, "rank 3 on n2: sha256 ", status.InvalidConfig},
		{"no job file", func(rank int, s *Subject) {
			if rank == 3 {
				s.JobErr = errors.New("no such file")
			}
		}, "rank 3 on n2: cannot be read: no such file", status.InvalidConfig},
		{"copy of the data", func(rank int, s *Subject) {
			if rank > 1 {
				s.Files[0].List[0].Path = filepath.Join(other, "a.txt")
			}
		}, "a.txt differs between rank 0 on ", status.InvalidConfig},
		{"no data", func(rank int, s *Subject) {
			if rank > 1 {
				s.Files[0].List, s.Files[0].Err = nil, status.Errorf(status.IO, "data.path: a.txt: no such file")
			}
		}, "ranks 2, 3 on n2: a.txt: no such file", status.IO},
		{"no device", func(rank int, s *Subject) {
			if rank == 1 {
				s.Open = func() (device.Device, tensor.DType, error) {
					return nil, tensor.Invalid, status.Errorf(status.Device, "GPU 1 is lost")
				}
			}
		}, "rank 1 on n1: GPU 1 is lost", status.Device},
		{"output.dir", func(rank int, s *Subject) {
			if rank == 0 {
				s.Output = other
			}
		}, "", status.OK}, // all ranks look where rank 0 does
		{"no folder of an output file", func(rank int, s *Subject) { s.OutputKey, s.OneWriter = "gdn.output", true },
			"rank 0 on n1 cannot write into it: ", status.IO}, // a run does not create it
		{"clock", func(rank int, s *Subject) {
			if rank > 1 {
				s.now = func() time.Time { return time.Now().Add(3 * time.Second) }
			}
		}, "the clock of rank 2 on n2 differs by +3 s from that of rank 0 on n1; start NTP", status.InvalidArgument},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := check(t, 4, c.spoil)
			if c.want == "" && len(r.Findings) > 0 || c.want != "" &&
				(len(r.Findings) != 1 || !strings.Contains(r.Findings[0].Text, c.want)) || r.Code() != c.code {
				t.Errorf("code %v, %v: want %q", r.Code(), r.Findings, c.want)
			}
			if len(r.Links) != 6 {
				t.Errorf("%d links of 4 ranks", len(r.Links))
			}
			var out strings.Builder
			if err := r.Print(&out); err != nil ||
				strings.Count(out.String(), "\nn1 ")+strings.Count(out.String(), "\nn2 ") != 2 {
				t.Errorf("%v\n%s", err, out.String())
			}
		})
	}
}

// A folder that only rank 0 can see is not shared.
func TestOutputNotShared(t *testing.T) {
	found := check(t, 4, nil)
	if len(found.Findings) > 0 {
		t.Fatal(found.Findings)
	}
	r := &Report{Ranks: nodes(2, 1)}
	dir := t.TempDir()
	err := comm.RunLocal(2, func(c comm.Comm) error {
		x := *r
		own := filepath.Join(dir, fmt.Sprint(c.Rank()))
		if err := os.MkdirAll(own, 0o700); err != nil {
			return err
		}
		if c.Rank() == 1 { // the folder of rank 0 is hidden from rank 1
			c = blind{c, own}
		}
		// it need not be, if rank 0 alone writes
		if err := x.output(c, &Subject{Host: "n1", Output: own, OneWriter: true}); err != nil || len(x.Findings) > 0 {
			t.Errorf("one writer: %v, %v", x.Findings, err)
		}
		if err := x.output(c, &Subject{Host: "n1", Output: own}); err != nil {
			return err
		}
		if want := " is not shared: rank 1 on n2 does not see a file of rank 0 on n1; choose a folder on a shared file system"; len(
			x.Findings) != 1 ||
			!strings.Contains(x.Findings[0].Text, want) {
			t.Errorf("%v", x.Findings)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// blind is a communicator through which a rank gets the name of another folder than rank 0's.
type blind struct {
	comm.Comm
	dir string
}

func (b blind) AllGather(s device.Stream, dst, src tensor.Tensor, rows []int64) error {
	if err := b.Comm.AllGather(s, dst, src, rows); err != nil || dst.DType != tensor.U8 {
		return err
	}
	text := dst.RawBytes()
	if i := strings.Index(string(text), b.dir[:len(b.dir)-1]+"0"); i >= 0 {
		copy(text[i:], b.dir)
	}
	return nil
}

// In the schedule of any number of members, each pair meets once, and no member is in two pairs of
// a round.
func TestRounds(t *testing.T) {
	for n := range 20 {
		met := map[[2]int]int{}
		schedule := rounds(n)
		for _, round := range schedule {
			busy := map[int]bool{}
			for _, p := range round {
				met[p]++
				if busy[p[0]] || busy[p[1]] || p[0] >= p[1] || p[1] >= n {
					t.Errorf("%d members: round %v", n, round)
				}
				busy[p[0]], busy[p[1]] = true, true
			}
		}
		if len(met) != n*(n-1)/2 || len(schedule) > n {
			t.Errorf("%d members: %d pairs in %d rounds", n, len(met), len(schedule))
		}
		for p, times := range met {
			if times != 1 {
				t.Errorf("%d members: %v meet %d times", n, p, times)
			}
		}
	}
}

// A link that is much slower than others of its kind is named with both figures.
func TestSlowLinks(t *testing.T) {
	all := nodes(3, 2)
	var links []Link
	for a := range all {
		for b := a + 1; b < len(all); b++ {
			x := 10e9
			if all[a].Host == all[b].Host {
				x = 100e9
			}
			links = append(links, Link{a, b, x})
		}
	}
	if found := slowLinks(all, links); len(found) > 0 {
		t.Fatal(found)
	}
	links[1].Bytes = 4e9 // ranks 0 and 2
	found := slowLinks(all, links)
	want := "rank 0 on n1 and rank 2 on n2: 4 GB/s in each direction, the median of such links is 10 GB/s; check the cable"
	if len(found) != 1 || found[0].Code != status.Comm || !strings.Contains(found[0].Text, want) {
		t.Errorf("%v: want %s", found, want)
	}
}

// The measurement of links ends after its budget and says what it has left out.
func TestBudget(t *testing.T) {
	r := check(t, 6, func(_ int, s *Subject) { s.Budget = time.Nanosecond })
	if len(r.Links) != 3 || r.Unmeasured != 12 || len(r.Findings) != 1 ||
		!strings.HasPrefix(r.Findings[0].Text, "12 pairs were not measured") || r.Code() != status.OK {
		t.Errorf("%d links, %d left out: %v", len(r.Links), r.Unmeasured, r.Findings)
	}
}
