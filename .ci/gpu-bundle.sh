#!/usr/bin/env bash
# Makes a folder that runs the GPU tests on a host without network: the project as it lies here, the wheels it needs, CRIU,
# OpenSSH, and run.sh. `bash gpu-bundle/run.sh` over there is the one command.
#
#   .ci/gpu-bundle.sh [--python 3.12] [--out gpu-bundle]        --python: the version of the other host's python3
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

readonly most_mib=55 # such a host is often reached by copying a working tree, and that has limits
python_version=3.12
out=gpu-bundle
while [ $# -gt 0 ]; do
    case $1 in
    --python) python_version=$2 ;;
    --out) out=$2 ;;
    *)
        printf 'usage: %s [--python X.Y] [--out DIR]\n' "$0" >&2
        exit 2
        ;;
    esac
    shift 2
done

fail() { # CAUSE REMEDY
    printf 'gpu-bundle.sh: %s\n  %s\n' "$1" "$2" >&2
    exit 1
}

# The bundle is replaced whole: a folder that is none must not be lost to a mistyped --out.
[ ! -e "$out" ] || [ -e "$out/python-version" ] || fail "$out exists and is no bundle" "Name another folder with --out."
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
mkdir "$work"/{source,wheels}

# As it lies here, not as committed: what one tests over there is mostly not committed yet.
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ ! -e "$file" ] || printf '%s\0' "$file"
done | tar --null -cf - -T - | tar -xf - -C "$work/source"

# A wheel, for the host has no build backend. Built from a copy, so that nothing is left in the working tree.
cp -r "$work/source" "$work/build"
timeout 180 .venv/bin/python -m build --wheel --outdir "$work/wheels" "$work/build" >"$work/log" 2>&1 ||
    fail "building gpuckpt's wheel failed: $(tail -n 1 "$work/log")" "Mend pyproject.toml, then run this again."

# pip judges "python_version < …" by the Python it runs on, not by the one it downloads for.
extra=()
[ "$python_version" != 3.10 ] || extra=(tomli exceptiongroup)
timeout 300 .venv/bin/python -m pip download --quiet --only-binary=:all: --implementation cp \
    --python-version "$python_version" --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --dest "$work/wheels" \
    "$work"/wheels/gpuckpt-*.whl pip pytest pytest-timeout hypothesis "${extra[@]}" >"$work/log" 2>&1 ||
    fail "downloading wheels for Python $python_version failed: $(tail -n 1 "$work/log")" "See that pip reaches its index."

# Always the private copy: a CRIU of this host's own would not find its libraries over there.
.ci/criu.sh --private "$work/prefix/criu" >"$work/log"
mv "$work/prefix/criu" "$work/criu"
# migrate needs another host, and makes one out of namespaces and an sshd. Packed: half the size, and modes stay.
.ci/carry.sh "$work/programs" sshd ssh ssh-keygen unshare nsenter setsid mount
tar -czf "$work/programs.tar.gz" -C "$work" programs
rm -rf "$work/programs"
cp tests/gpu/run.sh "$work/run.sh"
printf '%s\n' "$python_version" >"$work/python-version"

rm -rf "$work"/{build,log,prefix}
size=$(du -sm "$work" | cut -f 1)
[ "$size" -le "$most_mib" ] || fail "the bundle has $size MiB, more than $most_mib" "Find what grew: du -a $work."
rm -rf -- "$out"
mkdir -p -- "$(dirname -- "$out")"
chmod 755 "$work"
cp -r -- "$work" "$out"
printf '%s: %s MiB, for Python %s, CRIU %s\n' "$out" "$size" "$python_version" \
    "$("$out/criu/bin/criu" --version | sed -n 's/^Version: //p')"
