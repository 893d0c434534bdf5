#!/bin/sh
# What `make tune` runs: attention, softmax and gemm on whatever is usable here, in under five minutes, then what to type next.
set -eu
cd "$(dirname "$0")/.."

if sh scripts/has_gpu.sh; then
    attention="trials=24 budget=110s"
    softmax="trials=24 budget=50s"
    gemm="trials=24 budget=100s"
else
    # a CPU runs these a thousand times slower than a GPU: attention and gemm have smaller shapes there by default
    attention="trials=20 budget=60s"
    softmax="shape.m=4096 shape.n=4096 trials=20 budget=60s"
    gemm="trials=20 budget=90s"
fi
failed=0
for request in "problem=attention $attention" "problem=softmax $softmax" "problem=gemm $gemm"; do
    printf '\n$ tune %s\n' "$request"
    # shellcheck disable=SC2086  # the words are to be split
    .venv/bin/tune $request || failed=$?
done
exit "$failed"
