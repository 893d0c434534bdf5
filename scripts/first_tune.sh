#!/bin/sh
# What `make tune` runs: softmax and gemm on whatever is usable here, in under five minutes, then what to type next.
set -eu
cd "$(dirname "$0")/.."

if sh scripts/has_gpu.sh; then
    softmax="trials=24 budget=75s"
    gemm="trials=24 budget=150s"
else
    # a CPU runs gemm a thousand times slower than a GPU, hence the smaller shape
    softmax="shape.m=4096 shape.n=4096 trials=20 budget=60s"
    gemm="shape.m=1024 shape.n=1024 shape.k=1024 trials=20 budget=90s"
fi
failed=0
for request in "problem=softmax $softmax" "problem=gemm $gemm"; do
    printf '\n$ tune %s\n' "$request"
    # shellcheck disable=SC2086  # the words are to be split
    .venv/bin/tune $request || failed=$?
done
exit "$failed"
