#!/usr/bin/env bash
# openmpi-tree.sh DEST: copies the installed Open MPI 4 (Debian, Ubuntu) to a folder that works at
# any path and needs no root: `. DEST/env.sh && mpirun …`. It is for GPU nodes without MPI. Network
# stacks that need drivers are left out: ranks on one node communicate through shared memory, nodes
# through TCP.
set -euo pipefail
dest=${1:?usage: openmpi-tree.sh DEST}
path() { ompi_info --parsable --path "$1" | sed -n "s/^path:$1://p" | head -1; }
command -v ompi_info > /dev/null || { echo "openmpi-tree: Open MPI is not installed; run make deps" >&2; exit 3; }
bin=$(path bindir) pkg=$(path pkglibdir) data=$(path pkgdatadir)
pmix=$(dirname "$(find /usr/lib -path '*pmix2/lib/pmix' -type d | head -1)")
rm -rf "$dest" && mkdir -p "$dest"/{bin,lib/openmpi3,lib/pmix,share/openmpi,share/pmix,etc}

cp -L "$bin/orterun" "$bin/orted" "$dest/bin/"
ln -s orterun "$dest/bin/mpirun"
cp "$pkg"/*.so "$dest/lib/openmpi3/"
(cd "$dest/lib/openmpi3" && rm -f ./*ucx* ./*ofi* ./*psm* ./*openib* ./*slurm* ./*flux* ./*jsm* ./*gridengine* ./*monitoring* ./*sshmem* ./*scoll* ./*spml* \
  ./*memheap* mca_atomic* ./*romio* ./*reachable_netlink* libompi_dbg_msgq.so mca_vprotocol* mca_crs* mca_rmaps_mindist* mca_topo_treematch* \
  mca_pmix_isolated* mca_ras_simulator*)
cp "$pmix"/pmix/*.so "$dest/lib/pmix/" && rm -f "$dest"/lib/pmix/*slurm*
cp -L "$pmix"/libpmix.so.2 "$dest/lib/"
cp "$data"/help-*.txt "$dest/share/openmpi/"
cp "$(dirname "$pmix")"/share/pmix/help*.txt "$dest/share/pmix/" 2> /dev/null || cp /usr/share/pmix/help*.txt "$dest/share/pmix/" 2> /dev/null || true
# The libraries that the programs and plug-ins link, except the C library and libraries that every
# Linux has.
for f in "$dest"/bin/orte* "$dest"/lib/openmpi3/*.so "$dest"/lib/pmix/*.so "$dest"/lib/libpmix.so.2 "$(path libdir)/libmpi.so"; do ldd "$f"; done |
  awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u | grep -E '/lib(mpi|open-|mca_|hwloc|event|munge|pmix|udev)' |
  while read -r so; do cp -Ln "$so" "$dest/lib/"; done
cp -L "$(path libdir)/libmpi.so" "$dest/lib/libmpi.so.40"
strip --strip-unneeded "$dest"/lib/*.so* "$dest"/lib/*/*.so "$dest"/bin/orte* 2> /dev/null || true
printf 'btl_base_warn_component_unused = 0\nmtl = ^ofi\npml = ob1\nbtl = self,vader,tcp\nosc = ^ucx\n' > "$dest/etc/openmpi-mca-params.conf"
cat > "$dest/env.sh" << 'S'
# . env.sh puts this Open MPI first on the paths, wherever the folder is.
T=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OPAL_PREFIX=$T OPAL_BINDIR=$T/bin OPAL_LIBDIR=$T/lib OPAL_PKGLIBDIR=$T/lib/openmpi3 OPAL_DATADIR=$T/share OPAL_PKGDATADIR=$T/share/openmpi OPAL_SYSCONFDIR=$T/etc
export PMIX_INSTALL_PREFIX=$T PMIX_LIBDIR=$T/lib PMIX_PKGLIBDIR=$T/lib/pmix PMIX_DATADIR=$T/share PMIX_PKGDATADIR=$T/share/pmix PMIX_SYSCONFDIR=$T/etc
export LD_LIBRARY_PATH=$T/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PATH=$T/bin:$PATH
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm_rsh_agent=/bin/false OMPI_MCA_btl_vader_single_copy_mechanism=none
S
du -sh "$dest" | cut -f1
