"""Matrix product in TileLang: on the tensor cores in two schedules, for 16-bit types; in float32 on the ordinary cores."""

import tilelang

from kerneldyno.backends.tilelang import _compile
from kerneldyno.backends.tilelang import _gemm
from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported


_TMA_PITCH_BYTES = 16
"""A tensor map's rows start at multiples of this. Source: CUDA driver API, cuTensorMapEncodeTiled."""

_FP32_PITCH_PAD = 4


def space(workload: Workload, device: Device) -> Space:
    """The knobs: tile, pipeline, warpgroups and the order of tiles; they depend on the dtype and on what tensor maps can address.

    Args:
        workload: C [m, n] = A [m, k] times B, [n, k] in layout nt, [k, n] in nn.
        device: The GPU, for its shared memory and its multiprocessors.

    Raises:
        Unsupported: On a GPU without wgmma, in a 16-bit dtype.
    """
    if workload.dtype == "fp32":
        return _space_fp32(workload, device)
    if not device.arch.startswith("sm_90"):
        raise Unsupported(f"gemm in TileLang is written for wgmma (sm_90a) in {workload.dtype}; {device.name} is {device.arch}")
    return _space_tensor(workload, device)


_TILE = {"block_m": 128, "block_n": 256, "block_k": 64, "warpgroups": 2, "panel": 8}
_STARTS = (
    {**_TILE, "schedule": "pipelined", "stages": 3, "policy": "columns"},
    {**_TILE, "schedule": "pipelined", "stages": 4, "policy": "rows"},
    {**_TILE, "schedule": "overlapped", "stages": 3},
    {**_TILE, "schedule": "overlapped", "stages": 4, "pieces": 2},
    {**_TILE, "schedule": "overlapped", "block_m": 256, "block_n": 128, "stages": 4, "pieces": 2},
    {"schedule": "pipelined", "block_m": 64, "block_n": 64, "block_k": 64, "stages": 2, "warpgroups": 1, "panel": 4},
)
"""The first is what reached 691 TFLOP/s untuned at 8192^3, the others the best of earlier searches at 4096^3 and
1000 x 1003 x 517, bf16, H200 (docs/notes/gemm.md)."""


def _space_tensor(workload: Workload, device: Device) -> Space:
    m, n, k = (int(workload.shape[dim]) for dim in ("m", "n", "k"))
    size = DTYPE_BYTES[workload.dtype]
    limit = device.smem_per_block_bytes - _compile.STATIC_SMEM_BYTES
    k_mapped, n_mapped = (extent * size % _TMA_PITCH_BYTES == 0 for extent in (k, n))
    loads_mapped = k_mapped and (workload.shape["layout"] == "nt" or n_mapped)
    large = m * n >= 2 * device.sm_count * 128 * 128
    pipelined = {"when": lambda schedule: schedule == "pipelined"}
    overlapped = {"when": lambda schedule: schedule == "overlapped"}
    return Space(
        [
            Param(
                "schedule",
                ("overlapped", "pipelined") if loads_mapped and n_mapped else ("pipelined",),
                "overlapped: by hand, one group of wgmma stays in flight; pipelined: by the compiler",
            ),
            Param("block_m", (64, 128, 192, 256), "rows of a tile of C"),
            Param("block_n", (64, 128, 192, 256), "columns of a tile of C"),
            Param("block_k", (32, 64, 128), "depth of one step of the pipeline"),
            Param("stages", (2, 3, 4, 5, 6), "steps in flight between global and shared memory"),
            Param("warpgroups", (1, 2, 3), "groups of 128 threads that compute; a producer comes on top where warps are specialised"),
            Param("panel", (1, 4, 8, 16), "rows of tiles that blocks in flight share, for the L2 cache"),
            Param("blocks", (device.sm_count, 0), "blocks that take tiles in turn; 0: one block a tile", **overlapped),
            Param("pieces", (1, 2, 4), "pieces in which a tile of C goes through shared memory", **overlapped),
            Param(
                "policy",
                ("rows", "columns"),
                "whether warpgroups share a tile's rows or its columns out",
                when=lambda schedule, warpgroups: schedule == "pipelined" and warpgroups > 1,
            ),
            Param("c_shared", (True, False), "write C through shared memory, by a tensor map where its pitch allows one", **pipelined),
            Param(
                "specialise",
                # in large products cp.async costs the computing threads more issue slots than it can return
                (True,) if large else (True, False),
                "a producer warpgroup loads through tensor maps; else every thread loads, with cp.async",
                when=lambda schedule: schedule == "pipelined" and loads_mapped,
            ),
        ],
        [
            Constraint(
                lambda block_m: block_m == 64 or block_m < 2 * m,
                f"a tile is less than twice as high as C ({m} rows)",
            ),
            Constraint(
                lambda block_n: block_n == 64 or block_n < 2 * n,
                f"a tile is less than twice as wide as C ({n} columns)",
            ),
            Constraint(
                lambda block_k: block_k == 32 or block_k < 2 * k,
                f"a step is less than twice as deep as A and B ({k})",
            ),
            Constraint(
                lambda block_m, block_n: block_m * block_n >= (128 * 128 if large else 64 * 64),
                "where C has two tiles of 128 x 128 for each multiprocessor, smaller ones only load more often",
            ),
            Constraint(
                lambda block_k, stages: 128 <= block_k * stages <= 384,
                "the pipeline holds 128 to 384 of k: less starves the tensor cores, more is never used",
            ),
            Constraint(
                lambda block_m, block_n, warpgroups: 64 * 64 * warpgroups <= block_m * block_n <= (2, 4, 4.5)[warpgroups - 1] * 64 * 128,
                "a thread sums 32 to 128 elements, 96 where three warpgroups compute: more do not fit in its registers",
            ),
            Constraint(
                lambda schedule, block_m, warpgroups: schedule == "pipelined" or block_m % (64 * warpgroups) == 0,
                "a warpgroup has multiples of 64 rows of its own in the overlapped schedule",
            ),
            Constraint(
                lambda block_m, block_n, warpgroups, policy: (
                    block_m % (64 * warpgroups) == 0 if policy == "rows" else block_n % (64 * warpgroups) == 0
                ),
                "a warpgroup has multiples of 64 rows or columns of its own",
            ),
            Constraint(
                lambda block_n, pieces: block_n % (64 * pieces) == 0,
                "a piece is multiples of 64 columns wide: 128 bytes, the span of the swizzle",
            ),
            Constraint(
                lambda block_m, block_n, block_k, stages, pieces: (
                    stages * (block_m + block_n) * block_k * size + block_m * block_n * size // pieces <= limit
                ),
                f"shared memory (stages x tiles of A and B, and a piece of C) is at most {limit} bytes a block",
            ),
            Constraint(
                lambda block_m, block_n, block_k, stages: stages * (block_m + block_n) * block_k * size <= limit,
                f"shared memory (stages x tiles of A and B) is at most {limit} bytes a block",
            ),
        ],
        _STARTS,
    )


def _space_fp32(workload: Workload, device: Device) -> Space:
    m, n, k = (int(workload.shape[dim]) for dim in ("m", "n", "k"))
    limit = device.smem_per_block_bytes
    return Space(
        [
            Param("block_m", (64, 128), "rows of a tile of C"),
            Param("block_n", (64, 128), "columns of a tile of C"),
            Param("block_k", (8, 16, 32), "depth of one step of the pipeline"),
            Param("stages", (2, 3, 4), "steps in flight between global and shared memory"),
            Param("panel", (1, 4, 8, 16), "rows of tiles that blocks in flight share, for the L2 cache"),
        ],
        [
            Constraint(lambda block_m: block_m == 64 or block_m < 2 * m, f"a tile is less than twice as high as C ({m} rows)"),
            Constraint(lambda block_n: block_n == 64 or block_n < 2 * n, f"a tile is less than twice as wide as C ({n} columns)"),
            Constraint(lambda block_k: block_k == 8 or block_k < 2 * k, f"a step is less than twice as deep as A and B ({k})"),
            Constraint(
                lambda block_m, block_n, block_k, stages: (
                    stages * (block_m + block_n) * (block_k + _FP32_PITCH_PAD) * DTYPE_BYTES["fp32"] <= limit
                ),
                f"shared memory (stages x tiles of A and B) is at most {limit} bytes a block",
            ),
        ],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration for an architecture such as "sm_90a"."""
    return _compile.build(program(workload, config), config, arch)


def program(workload: Workload, config: Config) -> _compile.Program:
    """Write the TileLang function of one configuration."""
    product = _gemm.Product(
        m=int(workload.shape["m"]),
        n=int(workload.shape["n"]),
        k=int(workload.shape["k"]),
        nt=workload.shape["layout"] == "nt",
        dtype=_compile.DTYPES[workload.dtype],
    )
    tile = {key: int(config[key]) for key in ("block_m", "block_n", "block_k", "stages", "panel")}
    if workload.dtype == "fp32":
        # its padded tiles are not what a tensor map can write
        return _compile.Program(_gemm.plain(product, **tile), {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
    if config["schedule"] == "overlapped":
        function = _gemm.overlapped(
            product, **tile, consumers=int(config["warpgroups"]), blocks=int(config["blocks"]), pieces=int(config["pieces"])
        )
        # the compiler cannot see that one warpgroup still reads what another no longer does
        return _compile.Program(function, {tilelang.PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True})
    function = _gemm.pipelined(
        product,
        **tile,
        warpgroups=int(config["warpgroups"]),
        policy=str(config.get("policy", "rows")),
        c_shared=bool(config["c_shared"]),
    )
    return _compile.Program(function, {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: not config.get("specialise", False)})


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made."""
    return _compile.load(artifact, ("a", "b", "c"))
