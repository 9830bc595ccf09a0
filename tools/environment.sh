# What tools/test and tools/quickstart need of a machine: system packages and virtual
# environments. Sourced, never run.
#
# Owns: .venv/ (git-ignored). An environment is made again when what it was made from changed,
# and reused otherwise.
# Callers set -euo pipefail and stand in the repository root.

say() { printf '\033[1m%s\033[0m\n' "$*"; }
fail() {
    printf '%s\n' "$*" >&2
    exit 6
}

# need_programs PACKAGE:PROGRAM...  installs the Debian packages of the programs that are missing.
need_programs() {
    local pair missing=()
    for pair in "$@"; do
        command -v "${pair#*:}" >/dev/null 2>&1 || missing+=("${pair%%:*}")
    done
    install_packages ${missing[@]+"${missing[@]}"}
}

# As need_programs, but goes on without them.
want_programs() {
    (need_programs "$@") || say "goes on without $*"
}

install_packages() {
    [ $# -gt 0 ] || return 0
    command -v apt-get >/dev/null 2>&1 ||
        fail "missing here: $* (Debian's names); this is no Debian, please install them by hand"
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null 2>&1 || fail "missing here: $*; run as root: apt-get install $*"
        as_root=(sudo)
    fi
    say "installing $*"
    local log
    log=$(mktemp)
    as_root+=(env DEBIAN_FRONTEND=noninteractive)
    if ! {
        "${as_root[@]}" apt-get update -q &&
            "${as_root[@]}" apt-get install -q -y --no-install-recommends "$@"
    } </dev/null >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "apt-get could not install $*"
    fi
    rm -f "$log"
}

python_is_fit() {
    "$1" -c '
import ensurepip, sys, venv
sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

# find_python  prints a Python 3.10 to 3.14 that can make a virtual environment: $PYTHON, else
# the first on the path.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14 python3.10; do
        if command -v "$candidate" >/dev/null 2>&1 && python_is_fit "$candidate"; then
            # the interpreter itself, not a version switcher's stand-in for it
            "$candidate" -c 'import os, sys; print(os.path.realpath(sys.executable))'
            return 0
        fi
    done
    return 1
}

# need_system  everything below Python that acpfs needs: an interpreter, fusermount3, openssl.
need_system() {
    [ -n "${PYTHON_BASE:-}" ] && return 0
    if ! PYTHON_BASE=$(find_python); then
        [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.14 with venv"
        install_packages python3 python3-venv python3-dev
        PYTHON_BASE=$(find_python) ||
            fail "no Python 3.10 to 3.14 with venv found; set PYTHON to one"
    fi
    need_programs fuse3:fusermount3 openssl:openssl
}

# need_compiler  what pyfuse3 is compiled with (the libfuse transport, the tests' faulty file
# systems); after need_system.
need_compiler() {
    need_programs pkg-config:pkg-config gcc:gcc
    local header version missing=()
    pkg-config --exists fuse3 2>/dev/null || missing+=(libfuse3-dev)
    printf '#include <stdlib.h>\n' | gcc -E -x c - >/dev/null 2>&1 || missing+=(libc6-dev)
    header=$("$PYTHON_BASE" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    version=$("$PYTHON_BASE" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ -e "$header" ] || missing+=("python$version-dev")
    install_packages ${missing[@]+"${missing[@]}"}
}

need_fuse_device() {
    [ -e /dev/fuse ] ||
        fail "no /dev/fuse here: the kernel has no FUSE, or this container was not given the device"
}

# need_venv NAME FILE... -- PIP_ARGUMENT...
# Makes .venv/NAME by `pip install PIP_ARGUMENT...` unless it was made from the same FILEs,
# arguments and interpreter before.
need_venv() {
    local name=$1 stamp want files=()
    need_system
    shift
    while [ "$1" != -- ]; do
        files+=("$1")
        shift
    done
    shift
    stamp=.venv/$name/made-from
    want=$("$PYTHON_BASE" -V; printf '%s\n' "$PWD" "$@"; cat "${files[@]}" | cksum)
    if [ -x ".venv/$name/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
        return 0
    fi
    say "making the Python environment .venv/$name"
    rm -rf ".venv/$name"
    mkdir -p .venv
    "$PYTHON_BASE" -m venv ".venv/$name"
    local log=.venv/$name/pip.log
    local pip=(".venv/$name/bin/python" -m pip --disable-pip-version-check --no-input)
    # What is imported is compiled when it is: of torch and its companions that is a small part, and
    # compiling all of it took most of the time.
    if ! "${pip[@]}" install --no-compile "$@" </dev/null >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        fail "pip could not install $*"
    fi
    printf '%s\n' "$want" >"$stamp"
}

# release_loops DIRECTORY  takes limits from the loop devices whose images lie below DIRECTORY,
# and detaches them: a limit outlasts its program.
release_loops() {
    local backing device number limit
    for backing in /sys/block/loop*/loop/backing_file; do
        [ -r "$backing" ] || continue
        case $(cat "$backing") in "$1"/*) ;; *) continue ;; esac
        device=${backing#/sys/block/}
        device=${device%%/*}
        number=$(cat "/sys/block/$device/dev")
        for limit in /sys/fs/cgroup/blkio/blkio.throttle.{read,write}_bps_device; do
            [ ! -w "$limit" ] || echo "$number 0" >"$limit" || true
        done
        for limit in max_ratio:100 strict_limit:0; do
            echo "${limit#*:}" >"/sys/class/bdi/$number/${limit%:*}" || true
        done
        losetup --detach "/dev/$device" || true
        echo "left attached: $device"
    done
}

# end_leftovers DIRECTORY  ends what was started with ACPFS_STARTED_BELOW=DIRECTORY, or something
# below it, in its environment and takes away the mounts below DIRECTORY; says what it found.
# Nothing else on the machine is touched.
end_leftovers() {
    local pid mount left=() mounts=/proc/self/mountinfo
    for mount in $(awk -v top="$1/" 'index($5, top) == 1 && / - ext4 / {print $5}' $mounts); do
        # nobody else can, once it is unmounted
        fsfreeze --unfreeze "$(printf '%b' "$mount")" 2>/dev/null || true
    done
    for mount in $(awk -v top="$1/" 'index($5, top) == 1 {print $5}' $mounts | sort -r); do
        echo "left mounted: $mount"
        umount -l "$(printf '%b' "$mount")" || true
    done
    for pid in $( (
        grep -lszxF "ACPFS_STARTED_BELOW=$1" /proc/[0-9]*/environ
        grep -lszF "ACPFS_STARTED_BELOW=$1/" /proc/[0-9]*/environ
    ) 2>/dev/null | cut -d/ -f3 | sort -u); do
        [ "$pid" = "$$" ] || ! kill -0 "$pid" 2>/dev/null || left+=("$pid")
    done
    for pid in ${left[@]+"${left[@]}"}; do
        echo "left running: $pid $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-150)"
        kill -9 "$pid" 2>/dev/null || true
    done
    release_loops "$1"
}
