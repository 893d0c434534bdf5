"""The CUDA vector addition: numbers in the emulator, resources and instructions of its machine code for sm_90a."""

from collections.abc import Callable

import pytest
import torch

from kerneldyno.backends.cuda import vector_add
from kerneldyno.core import Config
from kerneldyno.core import Workload
from kerneldyno.testing.devices import H200


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _workload(n: int, dtype: str) -> Workload:
    return Workload("vector_add", {"n": n}, dtype)


def _config(threads: int, access_bytes: int, items: int) -> Config:
    hints = {"load": "stream", "store": "stream"} if access_bytes == 16 else {}
    return {"threads": threads, "access_bytes": access_bytes, "items": items, **hints}


@pytest.mark.parametrize(
    ("n", "dtype", "config"),
    [
        (5003, "bf16", _config(128, 16, 2)),
        (4096, "fp32", _config(256, 16, 4)),
        (1, "fp16", _config(128, 8, 1)),
        (1027, "fp16", _config(128, 4, 2)),
    ],
)
def test_numbers(emulate: Callable, n: int, dtype: str, config: Config) -> None:
    workload = _workload(n, dtype)
    assert not vector_add.space(workload, H200).problems(config)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    tensors = {"x": x, "y": y, "out": torch.full_like(x, float("nan"))}
    assert torch.equal(emulate(vector_add.build(workload, config, "sm_90a"), tensors).output, x + y)


def test_whole_packets_without_spills(disassemble: Callable) -> None:
    artifact = vector_add.build(_workload(1 << 24, "bf16"), _config(256, 16, 4), "sm_90a")
    assert artifact.spill_bytes == 0
    assert artifact.payload["blocks"] == 2048
    sass = disassemble(artifact.binary)
    assert sass.count("LDG.E.NA.128") == 8
    assert sass.count("STG.E.EF.128") == 4


def test_the_whole_space_compiles_for_the_widest_block() -> None:
    workload = _workload(1_000_003, "bf16")
    space = vector_add.space(workload, H200)
    widest = [config for config in space if config["threads"] == 1024 and config.get("load", "stream") == "stream"]
    assert len(widest) > 8
    for config in widest:
        artifact = vector_add.build(workload, config, "sm_90a")
        assert artifact.registers * artifact.threads <= H200.registers_per_sm
        assert artifact.spill_bytes == 0
