"""C = A W[expert]^T over rows sorted by expert, in C: one team for all groups, each item a block of one group's rows and of columns.

A block of many rows is a packed product as in `gemm` (Goto and van de Geijn 2008), but a thread packs for itself, so that groups of any
size follow one another without a barrier: packing a weight costs about one cycle and serves up to mc rows. A block of few rows would pay
more for packing than for the product, and reads the weights where they lie, once for every few rows.
"""

from typing import Any

import torch

from kerneldyno.backends.c._compile import CLaunch
from kerneldyno.backends.c._compile import build_library
from kerneldyno.backends.c._compile import threads_knob
from kerneldyno.backends.c._compile import vector_knob
from kerneldyno.backends.c._compile import vector_registers
from kerneldyno.backends.c._panels import DOTS
from kerneldyno.backends.c._panels import PACKING
from kerneldyno.backends.c._panels import ROWS
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
enum {{ MR = {mr}, NV = {nv}, NR = NV * W, MC = {mc} / MR * MR, NC = {nc} / NR * NR, KC = {kc}, KU = 4, DR = {direct_mr} }};
enum {{ DIRECT = {direct}, DIRECT_ROWS = (DIRECT + DR - 1) / DR * DR, MOST_ROWS = DIRECT_ROWS > MC ? DIRECT_ROWS : MC }};
"""

BLOCKS = """
// a thread's own memory
typedef struct { float *a, *b, *sums; element *rows; } own;

INLINE const element *row_of(const element *a, const int32_t *index, int64_t row, int64_t k) {
    return a + (index ? index[row] : row) * k;
}
static void packed_block(const element *a, const int32_t *index, const element *w, element *c, own my, int64_t first, int64_t rows,
                         int64_t columns, int64_t n, int64_t k) {
    for (int64_t p0 = 0; p0 < k; p0 += KC) {
        int64_t depth = LEAST(KC, k - p0), padded = (depth + KU - 1) / KU * KU, pitch = k;
        const element *from = a + first * k + p0;
        if (index) {  // the rows of a gather go side by side first: a copy for every NC products
            for (int64_t i = 0; i < rows; i++)
                memcpy(my.rows + i * KC, row_of(a, index, first + i, k) + p0, depth * sizeof(element));
            from = my.rows;
            pitch = KC;
        }
        for (int64_t i = 0; i < rows; i += MR)
            pack_rows(from + i * pitch, pitch, LEAST(MR, rows - i), MR, depth, padded, my.a + i * KC);
        for (int64_t j = 0; j < columns; j += NR)
            pack_rows(w + j * k + p0, k, LEAST(NR, columns - j), NR, depth, padded, my.b + j * KC);
        for (int64_t j = 0; j < columns; j += NR)
            for (int64_t i = 0; i < rows; i += MR)
                tile(my.a + i * KC, my.b + j * KC, my.sums + i * NC + j, NC, c + i * n + j, n, rows - i, columns - j, padded,
                     p0 == 0, p0 + KC >= k);
    }
}
static void direct_block(const element *a, const int32_t *index, const element *w, element *c, own my, int64_t first, int64_t rows,
                         int64_t columns, int64_t n, int64_t k) {
    int64_t pitch = (k + W - 1) / W * W;
    for (int64_t i = 0; i < rows; i++) widen_row(row_of(a, index, first + i, k), k, pitch, 1, my.a + i * pitch);
    for (int64_t i = rows; i % DR; i++) memset(my.a + i * pitch, 0, pitch * sizeof(float));
    for (int64_t j = 0; j < columns; j += 4)
        for (int64_t i = 0; i < rows; i += DR)
            dots(my.a + i * pitch, pitch, w + j * k, k, LEAST(4, columns - j), k, my.sums + i * NC + j, NC);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j += W) {
            vf v;
            memcpy(&v, my.sums + i * NC + j, sizeof v);
            if (j + W <= columns) store(c + i * n + j, v);
            else store_part(c + i * n + j, v, columns - j);
        }
}
"""

ENTRY = """
void moe_gemm(const element *a, const int32_t *index, const element *w, const int32_t *offsets, element *c, float *memory,
              int64_t pitch, int64_t experts, int64_t n, int64_t k) {{
    int64_t across = (n + NC - 1) / NC, items = 0;
    for (int64_t e = 0; e < experts; e++) items += (offsets[e] - (e ? offsets[e - 1] : 0) + MC - 1) / MC * across;
    #pragma omp parallel num_threads({threads})
    {{
        float *start = memory + omp_get_thread_num() * pitch;
        int64_t packed = MC * KC, wide = DIRECT_ROWS * ((k + W - 1) / W * W);
        own my = {{.a = start, .b = start + (packed > wide ? packed : wide)}};
        my.sums = my.b + NC * KC;
        my.rows = (element *)(my.sums + MOST_ROWS * NC);
        // a thread's items come in order (monotonic), so it walks the groups once
        int64_t expert = 0, before = 0;
        #pragma omp for schedule(monotonic: {schedule}) nowait
        for (int64_t item = 0; item < items; item++) {{
            int64_t begin, rows, down;
            for (;; expert++) {{
                begin = expert ? offsets[expert - 1] : 0;
                rows = offsets[expert] - begin;
                down = (rows + MC - 1) / MC;
                if (item < before + down * across) break;
                before += down * across;
            }}
            // the blocks of rows that share weights come one after another
            int64_t inside = item - before, i = inside % down * MC, j = inside / down * NC;
            const element *weight = w + (expert * n + j) * k;
            element *corner = c + (begin + i) * n + j;
            int64_t height = LEAST(MC, rows - i), width = LEAST(NC, n - j);
            if (height <= DIRECT) direct_block(a, index, weight, corner, my, begin + i, height, width, n, k);
            else packed_block(a, index, weight, corner, my, begin + i, height, width, n, k);
        }}
    }}
}}
"""


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: team, the blocks of rows and columns, the register tile, and which blocks are not packed."""
    registers, widest = vector_registers(device.arch)
    team = {"threads": device.sm_count}
    tiles = [{"vector_bytes": widest, "mr": 12, "nv": 2}, {"vector_bytes": min(widest, 32), "mr": 6, "nv": 2}]
    return Space(
        [
            threads_knob(device),
            Param("schedule", ("dynamic", "static"), "how OpenMP deals out the blocks", when=lambda threads: threads > 1),
            vector_knob(device.arch),
            Param("mr", (4, 6, 8, 12), "rows of the register tile"),
            Param("nv", (1, 2, 3, 4), "vectors in a row of the register tile"),
            Param("mc", (48, 96, 192), "rows of a block: a weight is read and packed once for them"),
            Param("nc", (96, 192, 768), "columns of a block, packed for the last-level cache"),
            Param("kc", (256, 512), "depth of the packed panels, for the L1 cache"),
            Param("direct", (0, 4, 8, 16, 32), "most rows of a block that reads the weights without packing them"),
            Param("direct_mr", (1, 2, 3, 4, 6), "rows of its register tile of 4 columns", when=lambda direct: direct > 0),
        ],
        [
            Constraint(
                lambda mr, nv: mr * nv + nv + 1 <= registers,
                f"the tile (mr x nv), a row of the weights (nv) and one of A fit the {registers} vector registers",
            ),
            Constraint(lambda mr, nv: mr * nv >= 8, "two FMA units of 4 cycles' latency need at least 8 sums in flight"),
            Constraint(
                lambda direct_mr: 4 * direct_mr + 4 <= registers,
                f"the tile (4 x direct_mr) and 4 weights fit the {registers} vector registers",
            ),
        ],
        # on a 2-core EPYC (AVX2), one thread: 72 GFLOP/s in groups of 256 rows (torch.mm: 83), 60 in bf16; in groups of 1 to 8
        # rows 1.4 to 2 times torch.mm in fp32 and 2 to 3.5 times in bf16; packing overtakes at 16 to 32 rows. The
        # tile of 12 rows needs 32 registers and was not measured
        [{**team, **tile, "mc": 192, "nc": nc, "kc": 512, "direct": 16, "direct_mr": 2} for nc in (192, 96, 768) for tile in tiles],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; it serves every shape and routing of the dtype, gathered or not."""
    knobs: dict[str, Any] = {"schedule": "static", "direct_mr": 1, **config}
    sizes, entry = (text.format(**knobs) for text in (SIZES, ENTRY))
    source = "".join([prelude(knobs["vector_bytes"], workload.dtype), sizes, PACKING, TILE, ROWS, DOTS, BLOCKS, entry])
    return build_library(source, "moe_gemm", config, arch, knobs["threads"])


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made; `prepare` allocates each thread's packed panels and partial sums."""
    knobs: dict[str, Any] = {"direct_mr": 1, **artifact.config}
    mc, nc, kc, direct_mr = (knobs[key] for key in ("mc", "nc", "kc", "direct_mr"))

    def arguments(inputs: Tensors, outputs: Tensors) -> tuple[Any, ...]:
        index, w, offsets, c = inputs.get("index"), inputs["w"], inputs["offsets"], outputs["c"]
        experts, n, k = w.shape
        direct_rows = (knobs["direct"] + direct_mr - 1) // direct_mr * direct_mr
        packed = max(mc * kc, direct_rows * (k + 16)) + nc * kc
        gathered = 0 if index is None else mc * kc
        # whole cache lines
        pitch = (packed + max(mc, direct_rows) * nc + gathered + 15) // 16 * 16
        memory = torch.empty(pitch * knobs["threads"])
        rows = inputs["a" if index is None else "x"]
        return rows, 0 if index is None else index, w, offsets, c, memory, pitch, experts, n, k

    return CLaunch(artifact, arguments)
