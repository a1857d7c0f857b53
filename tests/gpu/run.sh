#!/usr/bin/env bash
# Runs the GPU tests on a host without network, out of the folder that `make gpu-bundle` made. Needs root and a python3
# with PyTorch; leaves nothing there but the results.
#
#   bash run.sh [--out DIR] [PYTEST-ARGUMENT...]
#
# Environment: OUT (the folder for results; ./gpu-results), PYTHON (python3), GPUCKPT_GPU_SECONDS (the limit; 540).
set -euo pipefail

bundle=$(cd "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly bundle python=${PYTHON:-python3} limit=${GPUCKPT_GPU_SECONDS:-540}
out=${OUT:-gpu-results}
if [ "${1:-}" = --out ]; then
    out=$2
    shift 2
fi
mkdir -p -- "$out"
out=$(cd -- "$out" && pwd)

fail() { # CAUSE REMEDY
    printf 'run.sh: %s\n  %s\n' "$1" "$2" >&2
    exit 10
}

[ -d "$bundle/wheels" ] || fail "$bundle is no bundle" "Make one with make gpu-bundle, and run the run.sh in it."
version=$(timeout 20 "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "$python does not start" "Name an interpreter with PYTHON."
[ "$version" = "$(cat "$bundle/python-version")" ] ||
    fail "$python is $version, the bundle's wheels are for $(cat "$bundle/python-version")" \
        "Make the bundle again: make gpu-bundle PYTHON_VERSION=$version."

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

# A virtual environment, so that our pytest does not meet the host's. pip runs straight out of its wheel: neither it nor
# ensurepip need be on the host.
timeout 60 "$python" -m venv --without-pip "$work/venv"
PIP_CONFIG_FILE=/dev/null timeout 180 "$work/venv/bin/python" "$(echo "$bundle"/wheels/pip-*.whl)/pip" \
    --quiet --disable-pip-version-check install --root-user-action=ignore --no-cache-dir --no-compile \
    --no-index --find-links "$bundle/wheels" gpuckpt pytest pytest-timeout hypothesis
# As pip does where it is not told otherwise, but with all cores: a gpuckpt without bytecode takes half a second to start,
# and where PYTHONDONTWRITEBYTECODE is set it would take that every time.
timeout 120 "$work/venv/bin/python" -m compileall -q -j 0 "$work/venv/lib" >/dev/null || true
# The host's python3 may come from an environment itself, whose PyTorch --system-site-packages would miss: a .pth file
# names the packages it sees. Only now, or pip would take what is there for installed.
packages=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
timeout 60 "$python" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
    >"$packages/host-python.pth"

# A bundle that was copied here may have lost the modes of its programs.
cp -r -- "$bundle/criu" "$work/criu"
chmod 755 "$work"/criu/{bin/criu,sbin/criu,lib/loader}
export GPUCKPT_CRIU=$work/criu/bin/criu GPUCKPT_GPU_OUT=$out
why=$(timeout 60 "$GPUCKPT_CRIU" check 2>&1 >/dev/null) ||
    fail "CRIU does not work here: $(head -n 1 <<<"$why")" "The kernel or the container withholds what it needs."

# OpenSSH and what makes namespaces, where the host has none of its own.
tar -xzf "$bundle/programs.tar.gz" -C "$work" --no-same-owner

# The tests write caches beside themselves, and the bundle may be read-only.
cp -r -- "$bundle/source" "$work/source"
cd "$work/source"
# The plugins of the host's packages stay out; and tests find gpuckpt and python first in PATH.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
status=0
PATH=$work/venv/bin:$PATH:$work/programs/bin timeout --kill-after=30 "$limit" "$work/venv/bin/python" -m pytest tests/gpu -v \
    -p pytest_timeout -p no:cacheprovider --junit-xml="$out/junit.xml" "$@" </dev/null 2>&1 | tee "$out/pytest.log" || status=$?
exit "$status"
