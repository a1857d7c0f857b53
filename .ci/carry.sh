#!/usr/bin/env bash
# Copies programs of this host, with the libraries they name and the program loader, so that they run on another one,
# whatever C library that has. A program that is not here is left out, and named on stderr.
#
#   .ci/carry.sh DIR PROGRAM...            afterwards: DIR/bin/PROGRAM
set -euo pipefail

readonly target=$1
shift
PATH=$PATH:/usr/sbin:/sbin
mkdir -p -- "$target"/{bin,real,lib}

for name; do
    program=$(type -P "$name") || {
        printf 'carry.sh: there is no %s here\n' "$name" >&2
        continue
    }
    libraries=$(ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\/.*\/ld-/ { print $1 }')
    cp -L -- "$program" "$target/real/$name"
    while read -r library; do
        case $library in
        */ld-*) cp -L -- "$library" "$target/lib/loader" ;;
        *) cp -L -- "$library" "$target/lib/" ;;
        esac
    done <<<"$libraries"
    # --argv0: sshd starts itself anew for each connection, by the name it was called by, and must find the loader again.
    cat >"$target/bin/$name" <<'WRAPPER'
#!/bin/sh
self=$(readlink -f -- "$0") && here=${self%/bin/*}
exec "$here/lib/loader" --library-path "$here/lib" --argv0 "$self" "$here/real/${self##*/}" "$@"
WRAPPER
    chmod 755 "$target/bin/$name"
done
