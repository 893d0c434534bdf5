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
from kerneldyno.backends.c._panels import PACKING
from kerneldyno.backends.c._panels import TILE
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
                        tile(packed_a + i * KC, packed_b + j * KC, sums + i * n + j0 + j, n, c + i * n + j0 + j, n,
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
