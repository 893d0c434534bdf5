"""Softmax over rows in C: one thread a row, in two passes over it or in three."""

from typing import Any

import torch

from kerneldyno.backends.c._compile import CLaunch
from kerneldyno.backends.c._compile import build_library
from kerneldyno.backends.c._compile import threads_knob
from kerneldyno.backends.c._compile import vector_knob
from kerneldyno.backends.c._vectors import EXP
from kerneldyno.backends.c._vectors import prelude
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Tensors
from kerneldyno.core import Workload


# Each pass: U vectors at a time with U independent accumulators, then single vectors, the last one padded with -inf,
# whose exp is 0. Maxima begin at -FLT_MAX, since exp(-inf - -inf) would be NaN; a row of only -inf gives NaN all the same.
HELPERS = """
enum {{ U = {unroll} }};
INLINE vf load_at(const element *x, int64_t i, int64_t n) {{
    return i + W <= n ? load(x + i) : load_part(x + i, n - i, splat(-INFINITY));
}}
INLINE void write_at(element *y, int64_t i, int64_t n, vf v) {{
    if (i + W <= n) {write}(y + i, v);
    else store_part(y + i, v, n - i);
}}
"""

# Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867), algorithm 3, per lane.
ONLINE = """
static void softmax_row(const element *x, element *y, float *scratch, int64_t n, int64_t ahead) {
    vf top = splat(-FLT_MAX), sum = splat(0);
    int64_t i = 0;
    for (; i + U * W <= n; i += U * W) {
        vf v[U], high = top;
        for (int u = 0; u < U; u++) { v[u] = load(x + i + u * W); high = larger(v[u], high); }
        sum *= exp_vector(top - high);
        for (int u = 0; u < U; u++) sum += exp_vector(v[u] - high);
        top = high;
    }
    for (; i < n; i += W) {
        vf v = load_at(x, i, n), high = larger(v, top);
        sum = sum * exp_vector(top - high) + exp_vector(v - high);
        top = high;
    }
    float highest = largest_lane(top);
    float scale = 1 / sum_lanes(sum * exp_vector(top - highest));
    for (i = 0; i + U * W <= n; i += U * W) {
        PREFETCH(x + i + ahead)
        for (int u = 0; u < U; u++) write_at(y, i + u * W, n, exp_vector(load(x + i + u * W) - highest) * scale);
    }
    for (; i < n; i += W) write_at(y, i, n, exp_vector(load_at(x, i, n) - highest) * scale);
}
"""

THREE_PASS = """
static void softmax_row(const element *x, element *y, float *scratch, int64_t n, int64_t ahead) {
    vf tops[U], sums[U];
    for (int u = 0; u < U; u++) { tops[u] = splat(-FLT_MAX); sums[u] = splat(0); }
    int64_t i = 0;
    for (; i + U * W <= n; i += U * W)
        for (int u = 0; u < U; u++) tops[u] = larger(load(x + i + u * W), tops[u]);
    for (; i < n; i += W) tops[0] = larger(load_at(x, i, n), tops[0]);
    for (int u = 1; u < U; u++) tops[0] = larger(tops[u], tops[0]);
    float highest = largest_lane(tops[0]);
    for (i = 0; i + U * W <= n; i += U * W) {
        PREFETCH(x + i + ahead)
        for (int u = 0; u < U; u++) {
            vf v = exp_vector(load(x + i + u * W) - highest);
            memcpy(scratch + i + u * W, &v, sizeof v);
            sums[u] += v;
        }
    }
    for (; i < n; i += W) {
        vf v = exp_vector(load_at(x, i, n) - highest);
        memcpy(scratch + i, &v, sizeof v);
        sums[0] += v;
    }
    for (int u = 1; u < U; u++) sums[0] += sums[u];
    float scale = 1 / sum_lanes(sums[0]);
    for (i = 0; i < n; i += W) {
        vf v;
        memcpy(&v, scratch + i, sizeof v);
        write_at(y, i, n, v * scale);
    }
}
"""

PREFETCH = """
#define PREFETCH(p) for (int64_t at = 0; {prefetch} && at < U * W; at += 64 / sizeof(element)) __builtin_prefetch((p) + at);
"""

ENTRY = """
void softmax(const element *x, element *y, float *scratch, int64_t m, int64_t n, int64_t pitch) {{
    #pragma omp parallel num_threads({threads})
    {{
        float *own = scratch + omp_get_thread_num() * pitch;
        #pragma omp for schedule({schedule}, {rows}) nowait
        for (int64_t row = 0; row < m; row++)
            softmax_row(x + row * n, y + row * n, own, n, row + 1 < m ? n : 0);
        fence();
    }}
}}
"""


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: team, how rows are dealt out, vectors, passes, and how memory is read and written."""
    return Space(
        [
            threads_knob(device),
            Param(
                "method", ("three-pass", "online"), "maximum, exponentials into a buffer, scaling; or maximum with sum, exponentials again"
            ),
            Param("write", ("stream", "store"), "past the caches, or through them"),
            Param("prefetch", (1, 0), "fetch the next row during the pass that computes exponentials"),
            vector_knob(device.arch),
            Param("unroll", (1, 2, 4, 8), "vectors in flight"),
            Param("schedule", ("static", "dynamic"), "how OpenMP deals out the rows", when=lambda threads: threads > 1),
            Param("rows", (1, 4, 16), "rows that a thread takes at a time", when=lambda threads: threads > 1),
        ],
        # best on a 2-core EPYC (AVX2) at 4096 x 4096: half of torch's time
        starts=[{"threads": device.sm_count, "vector_bytes": 32, "unroll": 4, "rows": 4}],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; it serves every m and n of the dtype."""
    knobs: dict[str, Any] = {"schedule": "static", "rows": 1, **config}
    method = ONLINE if config["method"] == "online" else THREE_PASS
    parts = [prelude(int(config["vector_bytes"]), workload.dtype), EXP, HELPERS.format(**knobs), PREFETCH.format(**knobs), method]
    return build_library("".join([*parts, ENTRY.format(**knobs)]), "softmax", config, arch, int(config["threads"]))


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made; `prepare` allocates each thread's buffer of one row of fp32."""

    def arguments(inputs: Tensors, outputs: Tensors) -> tuple[Any, ...]:
        m, n = inputs["x"].shape
        # whole vectors of 64 bytes, and a cache line between threads' rows
        pitch = (n + 15) // 16 * 16 + 16
        scratch = torch.empty(pitch * int(artifact.config["threads"]))
        return inputs["x"], outputs["y"], scratch, m, n, pitch

    return CLaunch(artifact, arguments)
