#!/usr/bin/env bash
# mpi-build.sh MPICC go build ARGUMENTS... -o FILE ...: builds the program for the MPI library of a
# compiler wrapper, such as mpicc.mpich or /opt/mpich/bin/mpicc. make build MPICC=... calls it.
#
# Package comm and the package empi ask pkg-config for Open MPI under the name ompi; here pkg-config
# finds the flags of the wrapper under this name. Go's build cache does not compare what pkg-config
# says. Therefore both packages are also compiled with an option that has no effect (-D, a prefix of
# relative imports) and that differs for each wrapper.
set -euo pipefail
mpicc=$(command -v "$1") || { echo "mpi-build: $1: no such program; set MPICC to the mpicc of an MPI library" >&2; exit 1; }
shift
case $($mpicc -E -dM comm/mpi_calls.c | sed -n 's/^#define \(OPEN_MPI\|MPICH_VERSION\) .*/\1/p') in
  OPEN_MPI) library=libmpi.so ;;
  MPICH_VERSION) library=libmpich.so ;; # or libmpi.so, if it was not built by Debian
  *) echo "mpi-build: $mpicc belongs to an unknown MPI library; use the mpicc of Open MPI or MPICH" >&2; exit 1 ;;
esac
folder=$PWD/build/mpi/$(tr -c 'a-zA-Z0-9\n' - <<<"${mpicc#/}")
mkdir -p "$folder"
# flags PATTERN: the words of the wrapper's command that match. The folder of the library may be the
# word after -Wl,-rpath.
flags() { "$mpicc" -show | sed 's/ -Wl,-rpath -Wl,/ -Wl,-rpath,/g' | tr ' ' '\n' | grep -E "$1" | tr '\n' ' '; }
printf 'Name: ompi\nDescription: %s\nVersion: 0\nCflags: %s\nLibs: %s\n' "$mpicc" "$(flags '^-I')" "$(flags '^-(L|l|Wl,-rpath)')" >"$folder/ompi.pc"
for ((i = 1; i < $#; i++)); do
  [ "${!i}" = -o ] && j=$((i + 1)) && program=${!j}
done
PKG_CONFIG_PATH=$folder "$1" "$2" -gcflags="github.com/emer/empi/mpi=-D=$mpicc" -gcflags="ulysses/comm=-D=$mpicc" "${@:3}"
needed=$(readelf -d "$program" | sed -n 's/.*(NEEDED).*\[\(libmpi.*\)\]/\1/p')
case $library:$needed in
  libmpi.so:libmpi.so.[1-9][0-9]* | libmpich.so:libmpich.so.* | libmpich.so:libmpi.so.12) ;;
  *) echo "mpi-build: $program is linked with ${needed:-no MPI library}, not with that of $mpicc; run go clean -cache" >&2; rm -f "$program"; exit 1 ;;
esac
