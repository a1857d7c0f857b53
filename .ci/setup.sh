#!/usr/bin/env bash
# Makes this host ready to build, test and demonstrate gpuckpt: system programs, a virtual environment, CRIU. What is
# there already is left alone, so a second run takes a second. Needs Debian or Ubuntu with Python, and root.
#
# Environment: PYTHON (the interpreter the virtual environment is made from; python3), and what criu.sh reads.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

readonly python=${PYTHON:-python3}
readonly stamp=.venv/gpuckpt-setup

# Program, then the package it comes from. Programs are looked for, not packages: a host may have them from elsewhere.
readonly programs="
    ip iproute2
    sshd openssh-server
    ssh openssh-client
    gcc gcc
    make make
    mandoc mandoc
    setsid util-linux
    ps procps
    zstd zstd
"

fail() { # CAUSE REMEDY
    printf 'setup.sh: %s\n  %s\n' "$1" "$2" >&2
    exit 10
}

quietly() { # SECONDS WHAT COMMAND...
    local limit=$1 what=$2 log
    shift 2
    log=$(mktemp)
    if ! timeout "$limit" "$@" </dev/null >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f -- "$log"
        fail "$what failed" "The lines above are the last it said; mend that, then run this again."
    fi
    rm -f -- "$log"
}

missing_packages() {
    local program package
    while read -r program package; do
        [ -z "$program" ] || PATH=$PATH:/usr/sbin:/sbin type -P "$program" >/dev/null || printf '%s ' "$package"
    done <<<"$programs"
    [ -e /usr/include/stdio.h ] || printf 'libc6-dev '
    timeout 20 "$python" -c 'import ensurepip, venv' 2>/dev/null || printf 'python3-venv '
}

# The tests start an sshd of their own on loopback; one that listens for the whole host is not for us to start.
without_starting_services() { # COMMAND...
    local policy=/usr/sbin/policy-rc.d made='' status=0
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        made=$policy
        # shellcheck disable=SC2064  # the path is wanted as it is now
        trap "rm -f -- '$policy'" EXIT
    fi
    "$@" || status=$?
    [ -z "$made" ] || rm -f -- "$made"
    return "$status"
}

install_packages() {
    local packages
    read -ra packages <<<"$(missing_packages)"
    [ "${#packages[@]}" -gt 0 ] || return 0
    type -P apt-get >/dev/null ||
        fail "this host lacks ${packages[*]}, and has no apt to install them with" "Install what they stand for by hand."
    export DEBIAN_FRONTEND=noninteractive
    quietly 300 "apt-get update" apt-get -qq update
    without_starting_services \
        quietly 600 "installing ${packages[*]}" apt-get -qq install --no-install-recommends "${packages[@]}"
    printf 'setup: installed %s\n' "${packages[*]}"
}

# What the environment was made for: another pyproject.toml or another place needs a new install.
fingerprint() { printf '%s\n' "$PWD" | cat - pyproject.toml | sha256sum; }

make_environment() {
    if [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ] && timeout 20 .venv/bin/python -c 'import pytest' 2>/dev/null; then
        return
    fi
    timeout 20 "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python is older than 3.10, or does not start" "Name a newer one with PYTHON."
    if ! timeout 20 .venv/bin/python -m pip --version >/dev/null 2>&1; then
        rm -rf .venv
        quietly 120 "making .venv" "$python" -m venv .venv
    fi
    quietly 600 "installing gpuckpt and its tools into .venv" .venv/bin/python -m pip install --quiet --editable '.[dev]'
    fingerprint >"$stamp"
    printf 'setup: .venv is ready\n'
}

[ "$(id -u)" -eq 0 ] || fail "packages, CRIU and the tests need root" "Run it as root."
install_packages
make_environment
criu=$(.ci/criu.sh)
printf 'setup: CRIU is %s\n' "$criu"
