#!/bin/bash
# lab.sh starts a private Slurm cluster (22.05 or newer) on one machine for tests: munged, slurmctld
# and N virtual slurmd, without systemd, on the loopback interface.
#
#   lab.sh up     DIR [NODES] [CPUS_PER_NODE]   start (idempotent; default 2 nodes x 4 CPUs)
#   lab.sh down   DIR                           stop the processes that DIR's pid files name
#   lab.sh status DIR
#   lab.sh env    DIR                           print the exports of a client shell:
#                                               eval "$(lab.sh env DIR)"
#
# Packages (Debian 12 and 13): munge slurmctld slurmd slurm-client libpmix-dev. Slurm's mpi_pmix
# plugin opens the unversioned libpmix.so, which only libpmix-dev has.
# The script needs root: munged runs as root with --force, slurmctld and slurmd with
# SlurmUser=SlurmdUser=root.
# Each virtual node is a slurmd in its own UTS, IPC and mount namespace, with its own hostname (n1,
# n2, ...) and its own /dev/shm, so MPI sees separate nodes. Without them, Open MPI's files
# /dev/shm/vader_segment.<host>.<uid>.<job>.<localrank> of two virtual nodes are the same, and jobs
# over two nodes end with SIGSEGV in MPI_Barrier or MPI_Comm_split. With SLURM_NAMESPACES=0, or
# without the right to unshare(2), the nodes have no namespaces; then only the directories that
# TaskProlog sets for each node separate them.
# SLURM_BASE_PORT (default 27000) changes the ports, so two clusters (two CI runs) can run together.
set -euo pipefail
cmd=${1:?up|down|status|env}; DIR=$(mkdir -p "${2:?state directory}" && cd "$2" && pwd)
NODES=${3:-2}; CPUS=${4:-4}
[ ${#DIR} -le 60 ] || { echo "slurm-lab: $DIR is longer than 60 characters, so the daemons' UNIX socket paths would not fit; use a shorter path" >&2; exit 2; }
BASE=${SLURM_BASE_PORT:-$(cat "$DIR/etc/base" 2>/dev/null || echo 27000)}
HOST=$(hostname -s)
CONF=$DIR/etc/slurm.conf
SOCK=$DIR/run/munge.sock
export SLURM_CONF=$CONF

alive() { # pidfile name: whether the process of the file runs, is this program, and uses this DIR
  local p; [ -s "$1" ] && p=$(cat "$1" 2>/dev/null) && [[ $(cat "/proc/$p/comm" 2>/dev/null) == "$2"* ]] &&
    tr '\0' ' ' <"/proc/$p/cmdline" 2>/dev/null | grep -qF "$DIR/"
}
stop_one() { # pidfile name
  local p i
  if alive "$1" "$2"; then
    p=$(cat "$1"); kill -TERM "$p" 2>/dev/null || true
    for i in $(seq 50); do alive "$1" "$2" || break; sleep 0.1; done
    if alive "$1" "$2"; then kill -KILL "$p" 2>/dev/null || true; fi
  fi
  rm -f "$1"
}
need() { local b; for b in "$@"; do [ -n "$(PATH=$PATH:/usr/sbin:/sbin type -P "$b")" ] || { echo "slurm-lab: $b is missing; run apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client libpmix-dev" >&2; exit 2; }; done
  compgen -G '/usr/lib/*/libpmix.so' >/dev/null || { echo "slurm-lab: no libpmix.so, which srun --mpi=pmix needs; run apt-get install -y libpmix-dev" >&2; exit 2; }
}
PATH=$PATH:/usr/sbin:/sbin

NS=${SLURM_NAMESPACES:-auto}
if [ "$NS" = auto ]; then
  if unshare --uts --ipc --mount --propagation private -- sh -c 'hostname probe && mount -t tmpfs tmpfs /dev/shm' 2>/dev/null; then NS=1; else NS=0; fi
fi
nodehost() { if [ "$NS" = 1 ]; then echo "n$1"; else echo "$HOST"; fi; }
start_slurmd() { # node number
  if [ "$NS" = 1 ]; then
    unshare --uts --ipc --mount --propagation private -- sh -c 'hostname "$1" && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec slurmd -f "$2" -N "$1"' sh "n$1" "$CONF"
  else slurmd -f "$CONF" -N "n$1"; fi
}

write_conf() {
  mkdir -p "$DIR"/{etc,log,run,state,spool,munge}
  chmod 755 "$DIR" "$DIR/run"; chmod 700 "$DIR/munge"
  if [ ! -s "$DIR/munge/munge.key" ]; then
    (umask 077; head -c 1024 /dev/urandom >"$DIR/munge/munge.key"); chmod 400 "$DIR/munge/munge.key"
  fi
  echo "$BASE" >"$DIR/etc/base"
  local mem; mem=$(awk '/^MemTotal/{print int($2/1024*0.9)}' /proc/meminfo)
  {
    cat <<CONF_EOF
ClusterName=lab
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$BASE
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also the wait before a requeued job may start again (default 120 s)
AuthInfo=socket=$SOCK,cred_expire=10
CredType=cred/munge
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
# Each node has its own TmpFS. Otherwise both virtual nodes make
# <tmp>/spmix_appdir_<uid>_<job>.<step>, and the second launch fails with EEXIST.
TmpFS=$DIR/tmp/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
# no cgroups, no systemd, no binding
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog=$DIR/etc/taskprolog.sh
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.log
# The nodes are virtual: use slurm.conf instead of the hardware's values.
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=1,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=pmix
ReturnToService=2
MessageTimeout=20
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
KillWait=5
MinJobAge=300
Waittime=0
OverTimeLimit=0
TCPTimeout=5
JobRequeue=1
MaxArraySize=1001
PropagateResourceLimits=ALL
GresTypes=gpu
NodeName=DEFAULT CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$mem Gres=gpu:${SLURM_FAKE_GPUS:-0} State=UNKNOWN
CONF_EOF
    local i; for i in $(seq "$NODES"); do echo "NodeName=n$i NodeHostname=$(nodehost $i) NodeAddr=127.0.0.1 Port=$((BASE + i))"; done
    echo "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 OverSubscribe=YES:4 State=UP"
  } >"$CONF.new"
  # TaskProlog prints exports for every task: the scratch folder of its node, and Open MPI's
  # settings for an oversubscribed machine with only a loopback interface.
  {
    echo '#!/bin/sh'
    echo "t=$DIR/tmp/\$SLURMD_NODENAME; mkdir -p \"\$t\"; echo \"export TMPDIR=\$t\""
    echo 'echo "export OMPI_MCA_btl_tcp_if_include=lo"      # loopback is excluded by default'
    echo 'echo "unset OMPI_MCA_btl_tcp_if_exclude"' # Open MPI accepts one of the two
    echo 'echo "export OMPI_MCA_mpi_yield_when_idle=1"      # srun, unlike mpirun --oversubscribe, does not set it'
    echo 'echo "export OMPI_ALLOW_RUN_AS_ROOT=1"; echo "export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"   # for mpirun inside sbatch'
    if [ "$NS" != 1 ]; then
      echo "s=/dev/shm/slurmlab-$BASE-\$SLURMD_NODENAME; mkdir -p \"\$s\"; echo \"export OMPI_MCA_btl_vader_backing_directory=\$s\""
    fi
  } >"$DIR/etc/taskprolog.sh"
  chmod 755 "$DIR/etc/taskprolog.sh"
  # With two nodes, the plugin's tree fence releases ranks before all have entered. "mixed", the
  # default, uses it for fences without data. MPI_Init then crashed in 3 of 100 runs with 2 x 4
  # ranks (SIGSEGV at PC 0). The ring fence is a barrier.
  echo "PMIxCollFence=ring" >"$DIR/etc/mpi.conf"
  # Slurm from 23.02 on needs a file system of cgroups, also without plugins that use it, unless it
  # is told not to. Older versions do not know the word.
  if [ "$(slurmd -V | sed 's/^[^0-9]*\([0-9]*\).*/\1/')" -ge 23 ]; then
    echo "CgroupPlugin=disabled" >"$DIR/etc/cgroup.conf"
  fi
  # SLURM_FAKE_GPUS=k gives every node k GPUs that are null devices. Slurm then sets
  # CUDA_VISIBLE_DEVICES for each task, as on a real cluster.
  if [ "${SLURM_FAKE_GPUS:-0}" -gt 0 ]; then
    local g; : >"$DIR/etc/gres.conf"
    for g in $(seq 0 $((SLURM_FAKE_GPUS - 1))); do
      [ -e "$DIR/run/fakegpu$g" ] || mknod "$DIR/run/fakegpu$g" c 1 3
      echo "NodeName=n[1-$NODES] Name=gpu File=$DIR/run/fakegpu$g" >>"$DIR/etc/gres.conf"
    done
  else sed -i 's/ Gres=gpu:0//; /^GresTypes=/d' "$CONF.new"; rm -f "$DIR/etc/gres.conf"; fi
}

down() {
  local f
  if [ -s "$CONF" ] && alive "$DIR/run/slurmctld.pid" slurmctld; then
    timeout 5 scancel --quiet -u root 2>/dev/null || true   # no slurmstepd may run longer than its slurmd
    for f in $(seq 20); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.25; done
  fi
  for f in "$DIR"/run/slurmd-*.pid; do [ -e "$f" ] && stop_one "$f" slurmd; done
  stop_one "$DIR/run/slurmctld.pid" slurmctld
  stop_one "$DIR/run/munged.pid" munged
  rm -f "$SOCK" "$SOCK.lock"; rm -rf /dev/shm/slurmlab-"$BASE"-n*
}

up() {
  need munged slurmctld slurmd srun scontrol sinfo
  [ "$(id -u)" = 0 ] || { echo "slurm-lab: this user is not root; run the script as root" >&2; exit 2; }
  # Slurm calls getaddrinfo(NULL, AI_ADDRCONFIG), which finds no address if the machine has no IPv4
  # address except 127.x, as in a container without a network.
  if ! hostname -I 2>/dev/null | grep -q '[0-9]\.[0-9]'; then
    ip addr add 10.99.0.1/32 dev lo 2>/dev/null && echo "slurm-lab: only loopback has an IPv4 address: added 10.99.0.1/32 to lo" >&2 ||
      echo "slurm-lab: only loopback has an IPv4 address, and adding one failed, so Slurm will not start; run ip addr add 10.99.0.1/32 dev lo as root" >&2
  fi
  write_conf
  if [ -s "$CONF" ] && ! { cat "$CONF.new" "$DIR/etc/mpi.conf" "$DIR/etc/gres.conf" 2>/dev/null || true; } | cmp -s - "$DIR/etc/.running"; then down; rm -rf "$DIR/state"/* "$DIR/spool"/*; fi
  mv "$CONF.new" "$CONF"; cat "$CONF" "$DIR/etc/mpi.conf" "$DIR/etc/gres.conf" 2>/dev/null >"$DIR/etc/.running" || true
  local i
  if ! alive "$DIR/run/munged.pid" munged; then
    rm -f "$SOCK" "$SOCK.lock"
    munged --force --socket="$SOCK" --key-file="$DIR/munge/munge.key" --pid-file="$DIR/run/munged.pid" \
      --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/munged.seed" --num-threads=2
  fi
  # The daemons get no stdin and no inherited pipes. Otherwise a CI step that waits for EOF hangs.
  alive "$DIR/run/slurmctld.pid" slurmctld || slurmctld -f "$CONF" </dev/null >"$DIR/log/slurmctld.out" 2>&1 ||
    { cat "$DIR/log/slurmctld.out" >&2; exit 1; }
  for i in $(seq "$NODES"); do
    mkdir -p "$DIR/spool/n$i" "$DIR/tmp/n$i"
    alive "$DIR/run/slurmd-n$i.pid" slurmd || start_slurmd "$i" </dev/null >"$DIR/log/slurmd-n$i.out" 2>&1 ||
      { cat "$DIR/log/slurmd-n$i.out" >&2; exit 1; }
  done
  for i in $(seq 75); do
    [ "$(timeout 5 sinfo -h -N -o '%N %t' 2>/dev/null | grep -cE ' (idle|mix|alloc)$')" = "$NODES" ] && { status; return 0; }
    sleep 0.2
  done
  echo "slurm-lab: the nodes are not ready after 15 s; see the end of the logs below" >&2; status >&2 || true; tail -n 20 "$DIR"/log/slurm*.log >&2; return 1
}

status() {
  local f n ok=0
  [ -e "$DIR/run/slurmctld.pid" ] || { echo "down"; return 1; }
  for f in "$DIR"/run/*.pid; do n=$(basename "$f" .pid); n=${n%%-*}; alive "$f" "$n" && echo "$(basename "$f" .pid) pid $(cat "$f")" || { echo "$(basename "$f" .pid) dead"; ok=1; }; done
  timeout 5 sinfo -N -o '%N %t %c %m %E' || ok=1
  return $ok
}

case $cmd in
  up) up ;;
  down) down ;;
  status) status ;;
  env) echo "export SLURM_CONF=$CONF" ;;
  *) echo "usage: lab.sh up|down|status|env DIR [NODES] [CPUS]" >&2; exit 2 ;;
esac
