"""What runs on the far side of a swe-rex server: POSIX shell, nothing else.

A command is started apart from the server's own request, for the server answers nothing while a request of its runs;
so it can be looked after, limited and ended. Invariant: all that a command leaves behind bears its mark in the
environment and is killed by it. Binary data travels as base64.
"""

from __future__ import annotations

RESOLVE = """
root=$1 path=$2
case "$path" in /*) exit 41;; esac
real=$(realpath -m -- "$root/$path") || exit 40
case "$real" in "$root"|"$root"/*) ;; *) exit 41;; esac
"""
READ = f"""{RESOLVE}
[ -e "$real" ] || exit 40
[ -d "$real" ] && exit 43
[ -f "$real" ] || exit 42
head -c "$3" -- "$real" | base64
"""
WRITE = f"""{RESOLVE}
[ -d "$real" ] && exit 43
[ ! -e "$real" ] || [ -f "$real" ] || exit 42
mkdir -p -- "$(dirname -- "$real")" && base64 -d "$3" > "$real" && rm -f -- "$3"
"""
LIST = f"""{RESOLVE}
[ -d "$real" ] || exit 40
cd "$root" && find "$real" -type f -print0 | base64
"""
START = """
job=$1 cwd=$2 mark=$3; shift 3
cd "$cwd" 2>/dev/null || exit 44
base64 -d "$job/in64" > "$job/in" || exit 45
export GYRE_REX_MARK="$mark"
setsid sh -c 'job=$1; shift
"$@" < "$job/in" > "$job/out" 2> "$job/err"; echo $? > "$job/end"; mv "$job/end" "$job/code"' \\
    sh "$job" "$@" < /dev/null > /dev/null 2>&1 &
"""
LOOK = """
job=$1
if [ -f "$job/code" ]; then cat "$job/code"; else echo -; fi
cat "$job/out" "$job/err" 2>/dev/null | wc -c
"""
KILL = """
mark=$1 left=1
while [ "$left" = 1 ]; do
    left=0
    for place in /proc/[0-9]*; do
        if tr '\\0' '\\n' < "$place/environ" 2>/dev/null | grep -qx "GYRE_REX_MARK=$mark"; then
            kill -9 "${place#/proc/}" 2>/dev/null && left=1
        fi
    done
done 2>/dev/null
"""
TAKE = """
job=$1 keep=$2
touch "$job/out" "$job/err"
wc -c < "$job/out"; wc -c < "$job/err"
size=$(wc -c < "$job/out")
head -c "$keep" "$job/out" | base64 | tr -d '\\n'; echo
rest=$((keep - size)); [ "$rest" -gt 0 ] || rest=0
head -c "$rest" "$job/err" | base64 | tr -d '\\n'; echo
rm -rf "$job"
"""
PACK = """
cd "$1" && tar -cf - . | base64
"""
UNPACK = """
mkdir -p "$1" "$2" && cd "$1" && base64 -d "$3" | tar -xf - && rm -f "$3"
"""
