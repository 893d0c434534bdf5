"""A producer warpgroup that loads and consumers that multiply, scheduled by hand: what the matrix products share.

A consumer keeps one group of wgmma in flight: it frees a stage when the next stage's products are queued. The producer runs ahead into
the next tile while the consumers write the last. The consumers meet only at the pipeline's barriers, which the compiler cannot see:
shared memory must not be reused (`PASSES`).

Source: the roles and register counts follow CUTLASS's cooperative and ping-pong kernels for sm_90; the order of tiles is that of
Triton's tutorial 03-matrix-multiplication.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang
import tilelang.language as T


WARPGROUP = 128
"""Threads that issue one wgmma together."""

PASSES: Mapping[str, Any] = {tilelang.PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: True}
"""The compiler cannot see that one warpgroup still reads what another no longer does."""

FIRST_FREE_BARRIER = 8
"""Named barriers below are the compiler's."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The ring of stages between producer and consumers.

    Attributes:
        stages: Steps in flight.
        steps: Steps of one tile.
        consumers: Warpgroups that multiply.
        rows: Rows of the left operand of one consumer.
        columns: Rows, or where not `nt` columns, of the right operand, which the consumers share.
        nt: The right operand is [columns, depth], else [depth, columns].
        fenced: The producer's threads write what the consumers' wgmma read, which needs a fence between the two proxies.
    """

    stages: int
    steps: int
    consumers: int
    rows: int
    columns: int
    nt: bool = True
    fenced: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def full_arrivals(self) -> list[int]:
        """Arrivals that fill each stage: every thread of the producer."""
        return [WARPGROUP] * self.stages

    @property
    def empty_arrivals(self) -> list[int]:
        """Arrivals that free each stage: one thread of each consuming warp."""
        return [WARPGROUP // 32 * self.consumers] * self.stages


def registers(consumers: int, copies: bool = False) -> tuple[int, int]:
    """Registers a thread of the producer and of the consumers: together at most 512 for one thread of each, a register file over 128.

    Args:
        consumers: Warpgroups that multiply.
        copies: The producer's threads copy by themselves, with addresses of their own, rather than through tensor maps only.
    """
    producer = 40 if copies else 24
    # 504, the greatest multiple of 8 up to 512 less the producer's, shared out; 240 suffices for 128 sums
    return producer, min(240, (512 - producer) // consumers // 8 * 8)


def place(tile: Any, tiles_m: int, tiles_n: int, panel: int) -> tuple[Any, Any]:
    """Row and column of a tile: column by column inside bands of `panel` rows, so that blocks in flight share both operands in L2."""
    band = tile // (panel * tiles_n)
    height = T.min(tiles_m - band * panel, panel)
    return band * panel + tile % (panel * tiles_n) % height, tile % (panel * tiles_n) // height


def filling(pipe: Pipeline, load: Any) -> Any:
    """Make the producer's macro for one tile; `load(operands, step, slot)` loads one step and arrives at the stage's barrier."""
    stages = pipe.stages

    @T.macro
    def fill(operands, empty, first):  # noqa: ANN001, ANN202
        for step in T.serial(pipe.steps):
            count = first + step
            slot = T.cast(count % stages, "int32")
            T.barrier_wait(empty[slot], T.cast(count // stages % 2, "int32") ^ 1)
            load(operands, step, slot)

    return fill


def multiplying(pipe: Pipeline) -> Any:
    """Make a consumer's macro for one tile: it sums the products of all steps in registers."""
    stages, steps = pipe.stages, pipe.steps

    @T.macro
    def multiply(left, right, sums, full, empty, first, thread, consumer):  # noqa: ANN001, ANN202
        for step in T.serial(steps):
            count = first + step
            T.barrier_wait(full[T.cast(count % stages, "int32")], T.cast(count // stages % 2, "int32"))
            if pipe.fenced:
                T.fence_proxy_async()
            T.wgmma_gemm(
                left[consumer, T.cast(count % stages, "int32"), :, :],
                right[T.cast(count % stages, "int32"), :, :],
                sums,
                transpose_B=pipe.nt,
                policy=T.GemmWarpPolicy.FullRow,
                clear_accum=(step == 0),
            )
            if step > 0:
                T.wait_wgmma(1)
                if thread % 32 == 0:
                    T.mbarrier_arrive(empty[T.cast((count - 1) % stages, "int32")])
        T.wait_wgmma(0)
        if thread % 32 == 0:
            T.mbarrier_arrive(empty[T.cast((first + steps - 1) % stages, "int32")])
        T.warpgroup_fence_operand(sums, num_regs=pipe.rows * pipe.columns // WARPGROUP)

    return multiply


def sharing_out(pipe: Pipeline, consume: Any) -> Any:
    """Make the macro that gives each consumer warpgroup its part; `consume(operands, thread, consumer)` is one consumer's work."""

    @T.macro
    def share_out(operands, thread, consumer):  # noqa: ANN001, ANN202
        if consumer == pipe.consumers - 1:
            consume(operands, thread, consumer)
        else:
            if thread < WARPGROUP * (consumer + 2):
                consume(operands, thread, consumer)
            else:
                share_out(operands, thread, consumer + 1)

    return share_out
