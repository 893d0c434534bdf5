"""C = A B in C: packed, cache-blocked, with a register tile of fused multiply-adds.

Source: Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication"; Van Zee and van de Geijn 2015, "BLIS".
Panels of A (mr rows) and of B (nr columns) are packed for a depth of kc, as fp32 whatever the dtype and padded with zeros, so
that the register tile reads both in order. A block of A (mc x kc) is to stay in the L2 cache, a panel of B (kc x nr) in the L1
cache, and all panels of B (kc x nc) in the last-level cache.
"""

from typing import Any

import torch

from kerneldyno.backends.c._compile import CLaunch
from kerneldyno.backends.c._compile import build_library
from kerneldyno.backends.c._compile import threads_knob
from kerneldyno.backends.c._compile import vector_knob
from kerneldyno.backends.c._compile import vector_registers
from kerneldyno.backends.c._vectors import prelude
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Tensors
from kerneldyno.core import Workload


SIZES = """
enum {{ MR = {mr}, NV = {nv}, NR = NV * W, MC = {mc} / MR * MR, NC = {nc}, KC = {kc}, KU = {unroll} }};
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
"""

PACKING = """
typedef float v4 __attribute__((vector_size(16)));
// four rows of W become W columns of four: 4 x 4 transposes in registers, half the time of storing lane by lane
INLINE void transpose(const element *from, int64_t pitch, float *to, int64_t lines) {
    vf rows[4];
    for (int i = 0; i < 4; i++) rows[i] = load(from + i * pitch);
    for (int q = 0; q < W / 4; q++) {
        v4 r[4];
        for (int i = 0; i < 4; i++) memcpy(&r[i], (float *)&rows[i] + 4 * q, sizeof(v4));
        v4 low = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), high = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
        v4 low2 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), high2 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
        v4 columns[4] = {__builtin_shufflevector(low, low2, 0, 1, 4, 5), __builtin_shufflevector(low, low2, 2, 3, 6, 7),
                         __builtin_shufflevector(high, high2, 0, 1, 4, 5), __builtin_shufflevector(high, high2, 2, 3, 6, 7)};
        for (int i = 0; i < 4; i++) memcpy(to + (4 * q + i) * lines, &columns[i], sizeof(v4));
    }
}
// rows of a matrix along k become a panel [depth][lines]; `count` rows exist, the others are zeros
INLINE void pack_rows(const element *from, int64_t pitch, int64_t count, int64_t lines, int64_t depth, int64_t padded, float *panel) {
    for (int64_t line = 0; line < lines;) {
        const element *row = from + line * pitch;
        int64_t step = line + 4 <= LEAST(count, lines) ? 4 : 1, p = 0;
        if (step == 4) for (; p + W <= depth; p += W) transpose(row + p, pitch, panel + p * lines + line, lines);
        for (; p < padded; p++)
            for (int64_t i = 0; i < step; i++)
                panel[p * lines + line + i] = line < count && p < depth ? load_part(row + i * pitch + p, 1, splat(0))[0] : 0;
        line += step;
    }
}
// columns of B [k, n] become a panel [depth][NR]; `count` columns exist
INLINE void pack_columns(const element *from, int64_t pitch, int64_t count, int64_t depth, int64_t padded, float *panel) {
    for (int64_t p = 0; p < padded; p++)
        for (int64_t j = 0; j < NR; j += W) {
            int64_t left = p < depth ? count - j : 0;
            const element *at = from + p * pitch + j;
            vf v = left >= W ? load(at) : left > 0 ? load_part(at, left, splat(0)) : splat(0);
            memcpy(panel + p * NR + j, &v, sizeof v);
        }
}
"""

TILE = """
// a partial sum goes to `sums` (C itself where C is fp32), the last one to C
INLINE void put(vf v, float *sums, element *c, int64_t count, int first, int last) {
    int64_t bytes = count * sizeof(float);
    vf before = splat(0);
    if (count >= W) {
        if (!first) { memcpy(&before, sums, sizeof v); v += before; }
        if (last) store(c, v); else memcpy(sums, &v, sizeof v);
    } else if (count > 0) {
        if (!first) { memcpy(&before, sums, bytes); v += before; }
        if (last) store_part(c, v, count); else memcpy(sums, &v, bytes);
    }
}
static void tile(const float *a, const float *b, float *sums, element *c, int64_t pitch, int64_t rows, int64_t columns,
                 int64_t depth, int first, int last) {
    vf tile[MR][NV];
    for (int i = 0; i < MR; i++) for (int j = 0; j < NV; j++) tile[i][j] = splat(0);
    for (int i = 0; i < MR; i++) if (i < rows) __builtin_prefetch(sums + i * pitch, 1);  // they are needed after the loop
    for (int64_t p = 0; p < depth; p += KU)
        for (int u = 0; u < KU; u++, a += MR, b += NR) {
            vf line[NV];
            for (int j = 0; j < NV; j++) memcpy(&line[j], b + j * W, sizeof(vf));
            for (int i = 0; i < MR; i++) for (int j = 0; j < NV; j++) tile[i][j] += a[i] * line[j];
        }
    for (int i = 0; i < MR; i++)
        if (i < rows)
            for (int j = 0; j < NV; j++)
                put(tile[i][j], sums + i * pitch + j * W, c + i * pitch + j * W, columns - j * W, first, last);
}
"""

PACK_B = {
    "nt": "pack_rows(b + (j0 + j) * k + p0, k, LEAST(NR, width - j), NR, depth, padded, packed_b + j * KC);",
    "nn": "pack_columns(b + p0 * n + j0 + j, n, LEAST(NR, width - j), depth, padded, packed_b + j * KC);",
}

# the loops over blocks of A and panels of B that OpenMP deals out, and what follows them
DEAL = {
    "rows": ("#pragma omp for schedule({schedule})", "", ""),
    "columns": ("", "#pragma omp for schedule({schedule}) nowait", "#pragma omp barrier"),
    "tiles": ("#pragma omp for collapse(2) schedule({schedule})", "", ""),
}

ENTRY = """
void gemm(const element *a, const element *b, element *c, float *sums, float *packed_a, float *packed_b,
          int64_t m, int64_t n, int64_t k) {{
    #pragma omp parallel num_threads({threads})
    for (int64_t p0 = 0; p0 < k; p0 += KC) {{
        int64_t depth = LEAST(KC, k - p0), padded = (depth + KU - 1) / KU * KU;
        int first = p0 == 0, last = p0 + KC >= k;
        #pragma omp for nowait
        for (int64_t i = 0; i < m; i += MR)
            pack_rows(a + i * k + p0, k, LEAST(MR, m - i), MR, depth, padded, packed_a + i * KC);
        for (int64_t j0 = 0; j0 < n; j0 += NC) {{
            int64_t width = LEAST(NC, n - j0);
            #pragma omp for
            for (int64_t j = 0; j < width; j += NR)
                {pack_b}
            {deal_blocks}
            for (int64_t i0 = 0; i0 < m; i0 += MC)
                {deal_panels}
                for (int64_t j = 0; j < width; j += NR)
                    for (int64_t i = i0; i < LEAST(i0 + MC, m); i += MR)
                        tile(packed_a + i * KC, packed_b + j * KC, sums + i * n + j0 + j, c + i * n + j0 + j, n,
                             m - i, width - j, padded, first, last);
            {after}
        }}
    }}
}}
"""


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: team, what it shares out, the register tile, the cache blocks."""
    registers, _ = vector_registers(device.arch)
    return Space(
        [
            threads_knob(device),
            Param(
                "deal",
                ("tiles", "rows", "columns"),
                "what OpenMP deals out: blocks of A, panels of B, or both",
                when=lambda threads: threads > 1,
            ),
            Param("schedule", ("static", "dynamic"), "how OpenMP deals it out", when=lambda threads: threads > 1),
            vector_knob(device.arch),
            Param("mr", (4, 6, 8, 12), "rows of the register tile"),
            Param("nv", (1, 2, 3, 4), "vectors in a row of the register tile"),
            Param("mc", (48, 96, 192), "rows of a block of A, for the L2 cache"),
            Param("nc", (768, 3072), "columns of B packed at a time, for the last-level cache"),
            Param("kc", (128, 256, 512, 1024), "depth of the packed panels, for the L1 cache"),
            Param("unroll", (1, 4), "steps along k in one turn of the loop"),
        ],
        [
            Constraint(
                lambda mr, nv: mr * nv + nv + 1 <= registers,
                f"the tile (mr x nv), a row of B (nv) and one of A fit the {registers} vector registers",
            ),
            Constraint(lambda mr, nv: mr * nv >= 8, "two FMA units of 4 cycles' latency need at least 8 sums in flight"),
        ],
        # best on a 2-core EPYC (AVX2) at 1024^3: as fast as MKL on one core
        [
            {"threads": device.sm_count, "deal": deal, "vector_bytes": 32, "mr": 6, "nv": 2, "nc": 3072, "kc": 512, "unroll": 4}
            for deal in DEAL
        ],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; it serves every m, n and k of the dtype and layout."""
    knobs: dict[str, Any] = {"schedule": "static", "deal": "rows", **config}
    deal = dict(zip(("deal_blocks", "deal_panels", "after"), (text.format(**knobs) for text in DEAL[knobs["deal"]]), strict=True))
    entry = ENTRY.format(threads=knobs["threads"], pack_b=PACK_B[str(workload.shape["layout"])], **deal)
    source = prelude(knobs["vector_bytes"], workload.dtype) + SIZES.format(**knobs) + PACKING + TILE + entry
    return build_library(source, "gemm", config, arch, knobs["threads"])


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made; `prepare` allocates the packed panels and, below fp32, the partial sums."""
    mr, nv, vector_bytes, nc, kc = (int(artifact.config[key]) for key in ("mr", "nv", "vector_bytes", "nc", "kc"))

    def arguments(inputs: Tensors, outputs: Tensors) -> tuple[Any, ...]:
        m, k = inputs["a"].shape
        n = outputs["c"].shape[1]
        nr = nv * vector_bytes // 4
        packed_a = torch.empty((m + mr - 1) // mr * mr * kc)
        packed_b = torch.empty((min(n, nc) + nr - 1) // nr * nr * kc)
        sums = outputs["c"] if workload.dtype == "fp32" or k <= kc else torch.empty(m, n)
        return inputs["a"], inputs["b"], outputs["c"], sums, packed_a, packed_b, m, n, k

    return CLaunch(artifact, arguments)
