#!/usr/bin/env bash
# dist.sh: dist/ulysses-VERSION-linux-MACHINE.tar.gz from what make build, make lib and make wheel
# have built. make dist calls it. The same sources, compilers and libraries give the same archive:
# files are sorted, and have the time of the commit.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "dist: $*" >&2; exit 1; }
go=${GO:-go}
version=$(cat internal/version/VERSION)
commit=$(git describe --always --abbrev=12 --dirty=+ --exclude='*' 2>/dev/null || true)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
name=ulysses-$version-linux-$(uname -m)
work=dist/$name
for f in bin/ulysses-mpi build/portable/libulysses.so; do [ -e "$f" ] || fail "no $f; run make dist"; done

rm -rf "$work" "$work.tar.gz"
mkdir -p "$work"/{bin,lib/pkgconfig,include,share/doc/ulysses,wheel}
# The programs are linked to the symbols of an older glibc, too (scripts/link.sh). netgo: without
# the resolver of glibc.
stamp="-X ulysses/internal/version.commit=$commit -linkmode external -extld '\"$PWD/scripts/link.sh\"'"
$go build -ldflags "-s -w $stamp" -tags mpi,netgo -o "$work/bin/ulysses-mpi" ./cmd/ulysses-mpi
$go build -ldflags "-s -w $stamp" -tags netgo -o "$work/bin/ulysses-local" ./cmd/ulysses-mpi
cp capi/ulysses.h "$work/include/"
cp build/portable/libulysses.so "$work/lib/libulysses.so.0"
ln -s libulysses.so.0 "$work/lib/libulysses.so"
cp build/portable/libulysses_mpi_*.so "$work/lib/" 2>/dev/null || echo "dist: no lib/libulysses_mpi_*.so, so the library works only in hosts without MPI; make deps" >&2
if [ -e build/cuda/libulysses_cuda.so ]; then
  cp -L build/cuda/libulysses_cuda.so "$work/lib/"
else
  echo "dist: without the CUDA plug-in; make cuda builds it" >&2
fi
# The prefix is where the archive lies.
sed -e 's|@PREFIX@|${pcfiledir}/../..|; s|@VERSION@|'"$version"'|' capi/ulysses.pc.in >"$work/lib/pkgconfig/ulysses.pc"
cp dist/*"-$version-"*.whl "$work/wheel/" || fail "no wheel; run make dist"
cp LICENSE NOTICE CHANGELOG.md README.md "$work/share/doc/ulysses/"
tag=$(scripts/wheel-tag.sh "$work"/lib/libulysses.so.0 "$work"/bin/ulysses-local)
plugin="lib/libulysses_cuda.so    the CUDA plug-in: not in this archive"
if [ -e "$work/lib/libulysses_cuda.so" ]; then
  needs=$(scripts/wheel-tag.sh "$work/lib/libulysses_cuda.so")
  plugin="lib/libulysses_cuda.so    the CUDA plug-in, for ${needs%_"$(uname -m)"}"
fi
cat >"$work/README.txt" <<T
Ulysses $version (commit ${commit:-not recorded}), for Linux on $(uname -m), ${tag%_"$(uname -m)"}

bin/ulysses-mpi    the program for Open MPI 4 (libmpi.so.40): mpirun -n 4 bin/ulysses-mpi job.toml
bin/ulysses-local  the same program without MPI; its ranks are threads of one process
lib/, include/     libulysses for C, C++, Fortran: PKG_CONFIG_PATH=lib/pkgconfig pkg-config --cflags --libs ulysses
lib/libulysses_mpi_*.so   libulysses opens it in a host that uses MPI
$plugin
wheel/             the Python package: pip install wheel/*.whl
share/doc/ulysses  licenses and the changelog
SHA256SUMS         sha256sum -c SHA256SUMS
T
(cd "$work" && find . -type f ! -name SHA256SUMS -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum >SHA256SUMS)
tar --sort=name --mtime=@"$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u+rw,go+r,go-w \
  -C dist -cf - "$name" | gzip -n9 >"$work.tar.gz"
rm -rf "$work"

# The archive is complete, and the programs run from it.
try=$(mktemp -d)
trap 'rm -rf "$try"' EXIT
tar -xzf "$work.tar.gz" -C "$try"
(
  cd "$try/$name"
  sha256sum --quiet -c SHA256SUMS
  for program in ulysses-mpi ulysses-local; do
    bin/$program version | grep -F "ulysses-mpi $version" >/dev/null || fail "bin/$program version: $(bin/$program version)"
  done
)
(cd dist && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
echo "dist: $work.tar.gz: $(du -m "$work.tar.gz" | cut -f1) MiB"
