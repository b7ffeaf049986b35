//go:build !mpi

package comm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ulysses/internal/status"
	"ulysses/testkit/need"
)

// needTable builds the shim for this machine's MPI with mpicc and sets ULYSSES_MPI_SHIM to it.
func needTable(t *testing.T) {
	t.Helper()
	mpicc := need.Tool(t, "mpicc", "install libopenmpi-dev")
	t.Setenv(mpiVariable, compile(t, mpicc, "mpi_calls.c", mpiLibraries[0].file))
}

func compile(t *testing.T, cc, source, name string) string {
	t.Helper()
	folder, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), name)
	cmd := exec.Command(cc, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared",
		"-I", folder, "-o", file, source)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
	return file
}

// checkLoadedMPI checks that loadedMPI finds a library that was opened privately, as by a Python
// module.
func checkLoadedMPI(t *testing.T) {
	if loaded := loadedMPI(); firstWords(loaded) != libraryName() {
		t.Errorf("loaded: %q, opened: %q", loaded, libraryName())
	}
}

// TestShimExits checks that exit(0) of a C program ends MPI that the table started. With another
// code, the launcher must end the ranks that wait.
func TestShimExits(t *testing.T) {
	needTable(t)
	host := filepath.Join(t.TempDir(), "exits")
	if out, err := exec.Command("gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", host, "testdata/exits.c",
		"-ldl").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, code := range []int{0, 5} {
		began := time.Now()
		out, err := startProgram(t, 3, host, os.Getenv(mpiVariable), strconv.Itoa(code))
		have := 0
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			have = exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if have != code {
			t.Errorf("exit(%d): %v\n%s", code, err, out)
		}
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("exit(%d) took %v", code, took)
		}
	}
}

func TestShimFiles(t *testing.T) {
	const ompi, mpich = "libulysses_mpi_ompi.so", "libulysses_mpi_mpich.so"
	for _, c := range []struct {
		loaded, launcher string
		want             []string
	}{
		{"", "", []string{ompi, mpich}},
		{"", "PMI_SIZE", []string{mpich, ompi}},
		{"", "OMPI_COMM_WORLD_SIZE", []string{ompi, mpich}},
		{"MPICH Version:\t4.0.2\nMPICH Release date", "OMPI_COMM_WORLD_SIZE", []string{mpich}},
		{"Intel(R) MPI Library 2021.9 for Linux* OS\n", "", []string{mpich}},
		{"Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "PMI_SIZE", []string{ompi}},
		{"Other MPI 1.0", "", nil},
	} {
		for _, v := range []string{mpiVariable, "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} {
			t.Setenv(v, "")
		}
		if c.launcher != "" {
			t.Setenv(c.launcher, "4")
		}
		got, err := shimFiles(c.loaded)
		if !slices.Equal(got, c.want) || (err == nil) != (c.want != nil) {
			t.Errorf("%q under %q: %v, %v, want %v", c.loaded, c.launcher, got, err, c.want)
		}
		if err != nil {
			mustBe(t, c.loaded, err, status.Unsupported, `"Other MPI 1.0", for which there is no libulysses_mpi`)
		}
	}
	t.Setenv(mpiVariable, "/nowhere/x.so")
	_, err := shimFiles("")
	mustBe(t, "a file that is not there", err, status.InvalidArgument, "ULYSSES_MPI_SHIM=/nowhere/x.so: no such file")
}

// TestShimRefused checks that a file without the right table is refused with its name, and that no
// table is loaded then.
func TestShimRefused(t *testing.T) {
	source := func(text string) string {
		file := filepath.Join(t.TempDir(), "table.c")
		if err := os.WriteFile(file, []byte("#include \"mpi_table.h\"\n"+text), 0o644); err != nil {
			t.Fatal(err)
		}
		return compile(t, "gcc", file, "table.so")
	}
	const open = "__attribute__((visibility(\"default\"))) const umpi_api *umpi_table(uint32_t want, uint32_t *have) { static umpi_api t; (void)want, (void)t; "
	text := filepath.Join(t.TempDir(), "text.so")
	if err := os.WriteFile(text, []byte("no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		text:                     "cannot be opened",
		source("int nothing;\n"): "without the function umpi_table",
		source(open + "*have = 99; return 0; }\n"):                                              "has version 99 of the interface, this library has version 5",
		source(open + "*have = UMPI_ABI; t.abi = UMPI_ABI; t.size = 24; return &t; }\n"):        "a table of 24 bytes",
		source(open + "*have = UMPI_ABI; t.abi = 7; t.size = (uint32_t)sizeof t; return &t; }"): "has version 7",
	} {
		t.Setenv(mpiVariable, file)
		_, err := FromMPI(-1)
		mustBe(t, want, err, status.Unsupported, want)
		if !strings.Contains(err.Error(), file) || mpiStart.loaded {
			t.Errorf("%v; loaded: %v", err, mpiStart.loaded)
		}
	}
	if _, err := World(); status.Of(err) != status.Unsupported || Available() ||
		Library() != "none: built without the tag mpi" {
		t.Errorf("a program without MPI: %v, %v, %q", err, Available(), Library())
	}
	for _, c := range []struct{ headers, answers, want string }{
		{"Open MPI", "Open MPI v9.9", "uses Open MPI v9.9, the host program uses Open MPI v4.1.4"},
		{"MPICH", "Open MPI v4.1.4", "uses MPICH, the host program uses Open MPI v4.1.4"}, // the host's library answers
	} {
		other := source(
			fmt.Sprintf(
				"#include <string.h>\nstatic int says(char *text, int size) { (void)size; strcpy(text, %q); return 0; }\n",
				c.answers) + open +
				fmt.Sprintf(
					"*have = t.abi = UMPI_ABI; t.size = (uint32_t)sizeof t; t.headers = %q, t.library = says; return &t; }\n",
					c.headers))
		if err := openShim(other); err != nil {
			t.Fatal(err)
		}
		err := checkSameMPI(other, "Open MPI v4.1.4, package")
		mustBe(t, "another MPI", err, status.Unsupported, c.want)
		if mpiStart.loaded {
			t.Error("loaded although it was refused")
		}
	}
}
