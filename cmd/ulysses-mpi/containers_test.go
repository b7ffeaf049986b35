package main

import (
	"os"
	"os/exec"
	"testing"

	"ulysses/testkit/need"
)

// inMounts runs a shell script with mounts of its own, as root. The script is in a file system in
// memory, with a job that a run of two steps has ended. $program is this program.
func inMounts(t *testing.T, script string) {
	t.Helper()
	need.Namespaces(t)
	dir, _ := jobFolder(t)
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-euc", `
mkdir memory; mount -t tmpfs tmpfs memory; cp job.toml a.txt memory; cd memory
train() { "$program" job.toml -q --set checkpoint.every=1 --set train.steps="$@"; }
train 2
`+script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "ULYSSES_TEST_AS_PROGRAM=1", "program="+os.Args[0])
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// A volume of a container is a mount point, which cannot be renamed. Often it is the only folder
// that can be written.
func TestModelInMountPoint(t *testing.T) {
	for name, mount := range map[string]string{
		"volume":               "mount -t tmpfs tmpfs volume",
		"same file system":     "mkdir host; mount --bind host volume",
		"read-only container":  "mount -t tmpfs tmpfs volume; mount -o remount,ro .",
		"folder above it only": "chmod 555 .",
	} {
		t.Run(name, func(t *testing.T) {
			inMounts(t, "mkdir volume; "+mount+`
write() { setpriv --bounding-set -dac_override "$program" export out volume "$@"; }
write
cmp volume/model.safetensors out/model/model.safetensors
echo mine >volume/notes.txt
echo >volume/model-00001-of-00002.safetensors
write --force
test "$(echo $(ls -A volume))" = "config.json model.safetensors notes.txt"`)
		})
	}
}

// The folders of a container's image are in the lower layer of overlayfs, in which they cannot be
// renamed.
func TestResultsInImage(t *testing.T) {
	inMounts(t, `
mkdir image upper work container
mv out job.toml a.txt image
mount -t overlay -o lowerdir=image,upperdir=upper,workdir=work overlay container
cd container
train 4 --set 'checkpoint.accept=["train.steps"]'
test "$(echo $(ls -A out/checkpoints))" = "step-00000003 step-00000004"
if cmp -s out/model/model.safetensors ../image/out/model/model.safetensors; then echo "out/model is the old one"; exit 1; fi
test "$(echo $(ls -A out))" = "checkpoints metrics.jsonl model report.html"
train 4 --set checkpoint.resume=off --set output.overwrite=true --set checkpoint.keep=1
test "$(echo $(ls -A out/checkpoints))" = "step-00000004"`)
}

// doctor finds shared memory that cannot be written, whatever its size.
func TestSharedMemoryIsReadOnly(t *testing.T) {
	inMounts(t, `
mount -t tmpfs -o ro tmpfs /dev/shm
"$program" doctor >found
grep -q '^  shared memory  */dev/shm cannot be written: read-only file system$' found
grep -q '^  shared memory: MPI ranks of one node communicate more slowly' found`)
}
