#!/usr/bin/env bash
# Tests on real hardware what needs several GPUs or hosts, and prints a table to send back.
#
#   deploy/smoke/multi_gpu.sh                                   a host with 2 or more GPUs
#   deploy/smoke/multi_gpu.sh --serve ADDRESS                   the second host of two, first
#   deploy/smoke/multi_gpu.sh --peer HOST:PORT --here ADDRESS   the first host: RDMA between them
#
# ADDRESS is this host's address, as the other host reaches it. Run it from a checkout after `make setup`.
# Logs of failed checks stay in the folder that the last line names. Variables:
#   MODEL    a folder with a model whose heads all rank counts divide (default: random weights)
#   RANKS    rank counts to test (default: 2, 4 and 8, as far as there are GPUs)
#   DEVICE   cuda; cpu tests the script itself, without GPUs
#   UCX_TLS  between hosts (default: everything but TCP, so that a run without RDMA fails)
set -uo pipefail

here="" peer="" serve=""
while [ $# -gt 0 ]; do
    case "$1" in
        --here | --peer | --serve)
            [ $# -ge 2 ] || { echo "$1 needs a value" >&2; exit 2; }
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        --help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "$0"; exit 0 ;;
        *) echo "unknown argument $1; --help lists them" >&2; exit 2 ;;
    esac
done
if [ -n "$peer" ] && [ -z "$here" ]; then
    echo "--peer needs --here, this host's address" >&2
    exit 2
fi

cd "$(dirname "$0")/../.." || exit 2
device=${DEVICE:-cuda}
python=${PYTHON:-.venv/bin/python}
logs=$(mktemp -d "${TMPDIR:-/tmp}/baton-smoke.XXXXXX")
rows=()
failed=0

if [ "$device" = cuda ]; then
    count=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
else
    count=2
fi

check() { # check NAME ARGUMENTS…: runs one and adds its row
    local name=$1 began=$SECONDS output verdict
    shift
    local arguments=("$@" --device "$device")
    [ -n "${MODEL:-}" ] && arguments+=(--model "$MODEL")
    echo "… $name" >&2
    if output=$("$python" -m bench.multi_gpu "${arguments[@]}" 2>"$logs/log"); then
        verdict=ok
    else
        verdict=FAILED
        failed=1
        mv "$logs/log" "$logs/${name//[^a-zA-Z0-9]/-}.log"
        output=$(tail -n 1 "$logs/${name//[^a-zA-Z0-9]/-}.log")
    fi
    rows+=("| $name | $verdict | $((SECONDS - began)) s | ${output//|/\\|} |")
}

skip() { # skip NAME REASON
    rows+=("| $1 | not tried | | $2 |")
}

print_machine() {
    echo "machine: $(uname -m), $(nproc) cores, $(uname -r)"
    if [ "$device" = cuda ]; then
        nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader
        nvidia-smi topo --matrix
    fi
    "$python" - <<'PYTHON'
import importlib.metadata, torch
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
versions = {name: importlib.metadata.version(name) for name in ("baton-llm", "torch", "nixl", "ray")}
print(", ".join(f"{name} {version}" for name, version in versions.items()) + f", NCCL {nccl}")
PYTHON
    if command -v ibv_devinfo >/dev/null; then
        ibv_devinfo | grep -E 'hca_id|state|link_layer|active_mtu'
    fi
}

print_table() {
    echo "| check | result | time | seen |"
    echo "|---|---|---|---|"
    printf '%s\n' "${rows[@]}"
}

if [ -n "$serve" ]; then
    UCX_TLS=${UCX_TLS:-^tcp} exec "$python" -m bench.multi_gpu peer-worker \
        --host "$serve" --device "$device" --transport nixl ${MODEL:+--model "$MODEL"}
fi

if [ -n "$peer" ]; then
    export UCX_TLS=${UCX_TLS:-^tcp}
    check "NIXL between hosts, UCX_TLS=$UCX_TLS" between-hosts --host "$here" --peer "$peer" \
        --transport nixl
else
    for ranks in ${RANKS:-2 4 8}; do
        if [ "$ranks" -gt "$count" ]; then
            skip "tensor parallelism, $ranks ranks" "needs $ranks GPUs, has $count"
            skip "rank killed in a step, $ranks ranks" "needs $ranks GPUs, has $count"
        else
            check "tensor parallelism, $ranks ranks" tensor-parallel --ranks "$ranks"
            check "rank killed in a step, $ranks ranks" rank-killed --ranks "$ranks"
        fi
    done
    if [ "$count" -lt 2 ]; then
        skip "CUDA IPC between GPUs" "needs 2 GPUs, has $count"
    elif [ "$device" = cuda ]; then
        check "CUDA IPC between GPUs" between-gpus --transport cuda_ipc
    else
        skip "CUDA IPC between GPUs" "needs CUDA"
    fi
    if [ "$count" -lt 2 ]; then
        skip "NIXL between GPUs" "needs 2 GPUs, has $count"
    else
        check "NIXL between GPUs" between-gpus --transport nixl
    fi
    skip "NIXL over RDMA between hosts" "run with --serve on one host, --peer on the other"
fi

print_machine
echo
print_table
if [ "$failed" = 1 ]; then
    echo
    echo "logs of failed checks: $logs"
else
    rm -rf "$logs"
fi
exit "$failed"
