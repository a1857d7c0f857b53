#!/usr/bin/env bash
# The main job, on a sample program: save a process tree that is counting, see it end, bring it back, see it go on where
# it was. Where python3 has PyTorch with a GPU the program counts on that. Every command is shown before it runs; the
# exit status is 0 only if no number is missing and none comes twice.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Shells of some terminals and build tools leak descriptors; a pipe that leads out of the sample program would keep it
# from being saved, as it should.
for descriptor in /proc/self/fd/*; do
    number=${descriptor##*/}
    [ "$number" -le 2 ] || [ "$number" -eq 255 ] || eval "exec $number>&-"
done

PATH=$PWD/.venv/bin:$PATH
work=$(mktemp -d)
readonly work log=$work/log image=$work/image
pid=

cleanup() {
    # By the id that we started; a restored process has it again.
    [ -z "$pid" ] || ! counting || kill -KILL "$pid" 2>/dev/null || true
    rm -rf -- "$work"
}
trap cleanup EXIT

say() { printf '\n# %s\n' "$*"; }

show() { # COMMAND...
    local word line='$'
    for word; do
        [[ $word =~ ^[-+=/.:,_[:alnum:]]+$ ]] || word=${word@Q}
        line+=" $word"
    done
    printf '%s\n' "$line"
    timeout 300 "$@"
}

fail() {
    printf 'demo: %s\n' "$*" >&2
    exit 1
}

# Whether PID is still our program: the number alone could belong to somebody else by now.
counting() { tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$log"; }

numbers() { if [ -e "$log" ]; then wc -l <"$log"; else echo 0; fi; }

wait_for_numbers() { # HOW-MANY SECONDS
    local deadline=$((SECONDS + $2))
    until [ "$(numbers)" -ge "$1" ]; do
        [ "$SECONDS" -lt "$deadline" ] || fail "the program wrote $(numbers) numbers in $2 s, not $1"
        sleep 0.2
    done
}

wait_until_gone() {
    local deadline=$((SECONDS + 20))
    while [ -e "/proc/$pid" ]; do # the entry too: until it is reaped the id is not free for the restore
        [ "$SECONDS" -lt "$deadline" ] || fail "process $pid is still there"
        sleep 0.1
    done
}

torch_python() {
    local python
    type -P nvidia-smi >/dev/null && timeout 30 nvidia-smi >/dev/null 2>&1 || return 1
    # The environment in front of PATH has no PyTorch; the host's interpreter may.
    for python in $(type -Pa python3); do
        if timeout 120 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
            printf '%s' "$python"
            return
        fi
    done
    return 1
}

if python=$(torch_python); then
    program=("$python" tests/programs/gpu_counter.py "$log" 1)
    say "A program that counts on the GPU and keeps 1 GiB there."
else
    program=(.venv/bin/python tests/programs/counter.py "$log")
    say "A program that counts; no GPU with PyTorch was found on this host, so it counts on the CPU."
fi
printf '$ setsid %s </dev/null >/dev/null 2>&1 &\n' "${program[*]}"
setsid "${program[@]}" </dev/null >/dev/null 2>&1 &
pid=$!
disown "$pid" # or bash would report its end, which is what the demonstration is about, as "Killed"
wait_for_numbers 5 120
show tail -n 3 "$log"

say "Save it. Like criu dump, this ends the process once its image is safe on disk."
show gpuckpt dump --tree "$pid" "$image"

say "It has gone, and the counting has stopped."
wait_until_gone
printf '$ ps -p %s\n' "$pid"
ps -p "$pid" && fail "process $pid is still there"
show tail -n 1 "$log"
before=$(numbers)
sleep 1
[ "$(numbers)" -eq "$before" ] || fail "something still counts"

say "What the image holds."
show gpuckpt inspect "$image"

say "Bring it back."
show gpuckpt restore "$image"

say "It goes on from where it was, under the same process id."
wait_for_numbers $((before + 5)) 60
show ps -o pid,stat,args -p "$pid"
show tail -n +"$((before - 1))" "$log"

say "End it, and look at every number: each must be the one before plus one."
show kill "$pid"
wait_until_gone
# shellcheck disable=SC2016  # $1 belongs to awk
show awk 'NR == 1 { n = $1 } $1 != n++ { bad = 1 } END { print NR " numbers, the last is " $1; exit bad }' "$log" ||
    fail "the numbers have a gap or a repeat"
say "No gap, no repeat. Done."
