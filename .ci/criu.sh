#!/usr/bin/env bash
# Makes sure that this host has a CRIU that works here, and prints where it is: "PATH VERSION".
#
#   .ci/criu.sh [--private] [PREFIX]        PREFIX is /opt/gpuckpt/criu unless given
#
# The first of these that is new enough and passes `criu check` is taken: $GPUCKPT_CRIU; the one in PATH or a system
# directory; a private copy in PREFIX; the distribution's package; a private copy made now from a newer suite of the same
# distribution. --private skips all but the private copy (a bundle for another host needs one that can be moved).
#
# Environment: GPUCKPT_CRIU (the program to take, never replaced), GPUCKPT_CRIU_MIRROR and GPUCKPT_CRIU_SUITE (where the
# private copy comes from, instead of apt's own mirror).
set -euo pipefail

# 4.2 is the first to dump internet sockets on kernel >= 6.16, and the first that knows guard pages.
readonly oldest=4.2

private_only=
if [ "${1:-}" = --private ]; then
    private_only=yes
    shift
fi
prefix=$(realpath -m -- "${1:-/opt/gpuckpt/criu}")
work=

fail() { # CAUSE REMEDY
    printf 'criu.sh: %s\n  %s\n' "$1" "$2" >&2
    exit 10
}

cleanup() { [ -z "$work" ] || rm -rf -- "$work"; }
trap cleanup EXIT

at_least() { # VERSION OLDEST
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

version_of() { timeout 20 "$1" --version 2>/dev/null | sed -n 's/^Version: //p'; }

# CRIU names the cause first, then what came of it.
first_error() { { grep -F Error <<<"$1" || printf '%s' "$1"; } | head -n 1; }

why= # what is wrong with the last program that works_here looked at
works_here() { # PROGRAM
    local version
    if [ ! -x "$1" ]; then
        why="$1 is no program"
        return 1
    fi
    version=$(version_of "$1") || version=
    if [ -z "$version" ]; then
        why="$1 does not start"
    elif ! at_least "$version" "$oldest"; then
        why="$1 is $version, older than $oldest"
    elif ! why=$(timeout 60 "$1" check 2>&1 >/dev/null); then
        why="$1 check: $(first_error "$why")"
    else
        return 0
    fi
    return 1
}

found() { # PROGRAM
    printf '%s %s\n' "$1" "$(version_of "$1")"
    exit 0
}

installed_criu() {
    local place
    # cron and sudo leave the system directories out of PATH.
    for place in $(type -Pa criu) /usr/local/sbin/criu /usr/sbin/criu; do
        if [ "$place" != "$prefix/bin/criu" ] && works_here "$place"; then
            found "$place"
        fi
    done
}

packaged_criu() {
    local candidate
    candidate=$(LC_ALL=C apt-cache policy criu | sed -n 's/^ *Candidate: //p')
    if [ -z "$candidate" ]; then # a fresh container has no lists, and so no candidates
        timeout 180 apt-get -qq update </dev/null >"$work/update.log" 2>&1 || true
        candidate=$(LC_ALL=C apt-cache policy criu | sed -n 's/^ *Candidate: //p')
    fi
    if [ -z "$candidate" ] || ! at_least "$candidate" "$oldest"; then
        return 0
    fi
    if DEBIAN_FRONTEND=noninteractive timeout 300 \
        apt-get -qq install --no-install-recommends criu </dev/null >"$work/install.log" 2>&1; then
        installed_criu
    fi
}

# Debian and Ubuntu keep CRIU in different components, and name the next suite differently.
newer_suite() {
    local id
    # shellcheck source=/dev/null
    id=$(. /etc/os-release && printf '%s' "${ID:-}")
    case $id in
    debian) distribution=debian suite=forky components="main" ;;
    ubuntu) distribution=ubuntu suite=resolute components="main universe" ;;
    *) fail "no CRIU >= $oldest is known for this distribution (${id:-unknown})" \
        "Install CRIU >= $oldest and name it with GPUCKPT_CRIU." ;;
    esac
    suite=${GPUCKPT_CRIU_SUITE:-$suite}
}

# The host's mirror may be a local one, so it is asked of apt and never written down here.
host_mirror() {
    local codename
    if [ -n "${GPUCKPT_CRIU_MIRROR:-}" ]; then
        printf '%s' "$GPUCKPT_CRIU_MIRROR"
        return
    fi
    # shellcheck source=/dev/null
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    # The release named like this system first: third-party and security archives lack the newer suite.
    # shellcheck disable=SC2016  # $(…) belongs to apt here
    apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Identifier: Packages' 'Component: main' |
        awk -v codename="$codename" '
            $1 == codename && !exact { exact = $2 }
            $1 !~ /[-\/]/ && !any { any = $2 }
            END { print exact ? exact : any }'
}

host_keyring() {
    local file
    for file in "/usr/share/keyrings/$distribution-archive-keyring".{pgp,gpg}; do
        if [ -r "$file" ]; then
            printf '[signed-by=%s]' "$file"
            return
        fi
    done
}

# An apt state of its own: the host's sources, lists and package data base stay untouched, and the empty status file
# makes apt fetch every library, libc included, instead of trusting the older ones here.
private_apt() { # SECONDS APT-GET-ARGUMENT...
    local limit=$1
    shift
    timeout "$limit" apt-get -qq \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=- \
        -o Dir::State="$work/state" -o Dir::State::Lists="$work/lists" -o Dir::State::status="$work/status" \
        -o Dir::Cache="$work/cache" -o APT::Default-Release= -o APT::Sandbox::User=root \
        -o Acquire::Retries=3 -o Acquire::http::Timeout=30 \
        --no-install-recommends "$@" </dev/null >>"$work/apt.log" 2>&1
}

fetch_debs() {
    local mirror
    newer_suite
    mirror=$(host_mirror)
    [ -n "$mirror" ] || fail "apt names no mirror" "Set GPUCKPT_CRIU_MIRROR to a $distribution mirror."
    mkdir -p "$work"/{state,lists/partial,cache/archives/partial}
    : >"$work/status"
    printf 'deb %s %s %s %s\n' "$(host_keyring)" "$mirror" "$suite" "$components" >"$work/sources.list"
    if ! private_apt 180 update || ! private_apt 300 -d install criu; then
        fail "cannot fetch CRIU from $mirror $suite: $(grep -E '^[EW]:' "$work/apt.log" | head -n 1)" \
            "Check the network, or name another mirror (GPUCKPT_CRIU_MIRROR) or suite (GPUCKPT_CRIU_SUITE)."
    fi
}

# Only the program, its loader and the libraries it names: the rest (documentation, character sets) is twice their size.
keep_what_runs() { # ALL KEPT
    local all=$1 kept=$2 loader library libraries
    loader=$(find "$all/usr/lib" -path '*-linux-gnu*/ld-linux*.so.*' | head -n 1)
    [ -n "$loader" ] || fail "the packages hold no program loader" "Try another suite with GPUCKPT_CRIU_SUITE."
    libraries=${loader%/*}
    mkdir -p "$kept"/{bin,sbin,lib}
    cp -L "$all/usr/sbin/criu" "$kept/sbin/criu"
    cp -L "$loader" "$kept/lib/loader"
    "$loader" --library-path "$libraries" --list "$all/usr/sbin/criu" | awk '$2 == "=>" { print $3 }' |
        while read -r library; do
            [ "$library" -ef "$loader" ] || cp -L "$library" "$kept/lib/"
        done
    mkdir "$kept/licenses"
    (cd "$all/usr/share/doc" && for library in */copyright; do
        cp -L "$library" "$kept/licenses/${library%/*}"
    done)
    # The directory is found at run time, so the prefix may be moved or carried to another host.
    cat >"$kept/bin/criu" <<'WRAPPER'
#!/bin/sh
here=$(readlink -f -- "$0") && here=${here%/bin/*}
exec "$here/lib/loader" --library-path "$here/lib" "$here/sbin/criu" "$@"
WRAPPER
    chmod 755 "$kept/bin/criu"
}

private_criu() {
    local deb staging="$work/criu"
    fetch_debs
    mkdir -p "$work/all"
    for deb in "$work"/cache/archives/*.deb; do
        timeout 60 dpkg -x "$deb" "$work/all"
    done
    keep_what_runs "$work/all" "$staging"
    if ! works_here "$staging/bin/criu"; then
        fail "the CRIU fetched does not work here: $why" "Another suite (GPUCKPT_CRIU_SUITE) may hold a newer one; or the kernel or container withholds what CRIU needs."
    fi
    # A directory cannot be renamed over another one; whoever looks in between finds none and asks again.
    if [ -e "$prefix" ]; then
        mv -T -- "$prefix" "$work/replaced"
    fi
    mv -T -- "$staging" "$prefix"
}

if [ "$(id -u)" -ne 0 ]; then
    fail "CRIU cannot be checked or installed without root" "Run it as root."
fi

if [ -z "$private_only" ]; then
    if [ -n "${GPUCKPT_CRIU:-}" ]; then
        works_here "$GPUCKPT_CRIU" && found "$GPUCKPT_CRIU"
        fail "GPUCKPT_CRIU does not work: $why" "Name another one, or unset GPUCKPT_CRIU to have one fetched."
    fi
    installed_criu
fi

mkdir -p "$(dirname -- "$prefix")" 2>/dev/null || fail "cannot write to $(dirname -- "$prefix")" "Name another PREFIX."
exec 9>"$prefix.lock" # two setups at once would fetch twice and rename over each other
timeout 600 flock 9 || fail "another setup holds $prefix.lock" "Wait for it, then run this again."
if works_here "$prefix/bin/criu"; then
    found "$prefix/bin/criu"
elif [ -x "$prefix/bin/criu" ] && at_least "$(version_of "$prefix/bin/criu")" "$oldest"; then
    # It starts and is new enough: another copy of it would meet the same host.
    fail "$why" "Mend that (the kernel, the container, or a loopback that is down); or remove $prefix to fetch another one."
fi
type -P apt-get dpkg >/dev/null ||
    fail "no CRIU >= $oldest found, and this host has no apt to fetch it with" "Install it and name it with GPUCKPT_CRIU."
# Beside the prefix, for a rename works only within one file system.
work=$(mktemp -d -- "$prefix.work.XXXXXX")
if [ -z "$private_only" ]; then
    packaged_criu
fi
private_criu
found "$prefix/bin/criu"
