"""Records to store, and a database to store them in."""

import shutil
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Error
from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.store import open_store
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.store.records import PlayoffRecord
from kerneldyno.store.write import Writer


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "new.db"
    open_store(path).dispose()
    return path


@pytest.fixture
def engine(tmp_path: Path, new_database: Path) -> Iterator[Engine]:
    shutil.copy(new_database, tmp_path / "results.db")  # a tenth of the time of making one
    engine = open_store(tmp_path / "results.db")
    yield engine
    engine.dispose()


@pytest.fixture
def writer(engine: Engine) -> Writer:
    return Writer(engine)


@pytest.fixture
def gemm() -> Workload:
    return Workload("gemm", {"m": 4096, "n": 8192, "k": 512, "layout": "nt"}, "bf16")


@pytest.fixture
def device() -> Device:
    return Device("cuda", "NVIDIA H200", "sm_90a", 1, 132, 150_000_000_000, 232_448, 233_472, 65_536, 1024, 62_914_560, "580.95")


@pytest.fixture
def environment() -> Environment:
    return Environment({"driver": "580.95", "triton": "3.6.0"})


@pytest.fixture
def ok() -> Callable[[float], Outcome]:
    def make(median_us: float) -> Outcome:
        return Outcome(
            status=Status.OK,
            samples_us=(median_us - 1, median_us, median_us + 2.5),
            median_us=median_us,
            low_us=median_us - 1,
            high_us=median_us + 2.5,
            error=Error(0.0011, 0.25),
            sm_clock_mhz=1755.0,
            power_w=512.5,
            artifact=f"artifact{median_us}",
            build_s=1.5,
            measure_s=0.25,
            registers=168,
            smem_bytes=196_608,
            spill_bytes=0,
        )

    return make


@pytest.fixture
def study(writer: Writer, gemm: Workload, device: Device, environment: Environment) -> Callable[..., int]:
    def begin(backend: str = "triton", **changed: object) -> int:
        given: dict = {
            "workload": gemm,
            "device": device,
            "environment": environment,
            "backend": backend,
            "kernel_digest": "k1",
            "sampler": "tpe",
            "seed": 0,
            "command": f"tune problem=gemm backend={backend}",
            "fresh": False,
        }
        return writer.study(**(given | changed)).id

    return begin


@pytest.fixture
def playoff(writer: Writer, gemm: Workload, device: Device, environment: Environment) -> Callable[..., int]:
    def hold(*entries: PlayoffEntry, **changed: object) -> int:
        given: dict = {
            "workload": gemm,
            "device": device,
            "environment": environment,
            "seed": 3,
            "rounds": 15,
            "command": "tune problem=gemm",
            "conditions": {"cache": "cold", "rounds": 15},
            "entries": entries,
        }
        return writer.record_playoff(PlayoffRecord(**(given | changed)))

    return hold
