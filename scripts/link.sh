#!/bin/sh
# link.sh ARGUMENTS: links objects of gcc against the symbols of glibc $GLIBC, 2.28 if it is not
# set, and strips the result. The go command calls it (make portable). Zig has a table of the
# symbols of each version of glibc, and makes the libraries to link with from it.
exec "$(dirname "$0")/../.venv/link-tools/bin/python" -m ziglang cc \
  -target "$(uname -m)-linux-gnu.${GLIBC:-2.28}" "$@" -Wl,-s
