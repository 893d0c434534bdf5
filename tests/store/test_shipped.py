"""Shipped lines: out of a database, into one in memory, and the same ranking from both."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.engine import Engine

from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Work
from kerneldyno.core import Workload
from kerneldyno.errors import StoreError
from kerneldyno.store.query import ranking
from kerneldyno.store.records import Filters
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.store.shipped import load_shipped
from kerneldyno.store.shipped import to_lines
from kerneldyno.store.write import Writer


def _work(workload: Workload) -> Work:
    return Work(flops=2.0 * int(workload.shape["m"]), bytes=3.0)


@pytest.fixture
def lines(
    writer: Writer, engine: Engine, study: Callable[..., int], ok: Callable[[float], Outcome], playoff: Callable[..., int], gemm: Workload
) -> list[str]:
    """Two playoffs of gemm on two shapes, with things in them that do not ship."""
    small = replace(gemm, shape={**gemm.shape, "m": 1})
    for workload in (gemm, small):
        own = study(workload=workload)
        best = writer.record(own, 0, {"block_m": 128, "order": "grouped"}, ok(50.0), 1.0)
        writer.record(own, 1, {"block_m": 64, "order": "grouped"}, Outcome(Status.BUILD_ERROR, build_s=2.0), 2.0)
        writer.record(study("cuda", workload=workload), 0, {"a": 1}, ok(60.0), 1.0)  # took part in no playoff
        playoff(
            PlayoffEntry(
                "triton", "kernel", Status.OK, "triton", best, {"block_m": 128, "order": "grouped"}, (51.0, 52.0), 51.5, 51.0, 52.0,
                1.1, 1.05, 1.15, True, True, 0.001, 1755.0, 600.0, layout_us=93.5,
            ),
            PlayoffEntry("torch", "library", median_us=56.65, ratio=1.0, ratio_low=1.0, ratio_high=1.0, verified=True),
            PlayoffEntry("torch.compile", "library", median_us=55.0, ratio=1.03),  # not verified
            PlayoffEntry("tilelang", "kernel", Status.WRONG_RESULT, "tilelang", config={"a": 1}, message="recheck"),
            workload=workload,
        )  # fmt: skip
    return to_lines(engine, "gemm", _work)


def _ship(root: Path, lines: list[str]) -> Path:
    folder = root / "nvidia-h200"
    folder.mkdir()
    (folder / "gemm.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return root


def test_lines_say_everything(lines: list[str], gemm: Workload) -> None:
    found = [json.loads(line) for line in lines]
    assert [(line["shape"]["m"], line["name"]) for line in found] == [(1, "triton"), (1, "torch"), (4096, "triton"), (4096, "torch")]
    assert found[2]["playoff"] == found[3]["playoff"] != found[0]["playoff"]
    created_at, playoff = found[2].pop("created_at"), found[2].pop("playoff")
    assert created_at.endswith("+00:00")
    assert len(playoff) == 32
    assert found[2] == {
        "schema_version": 1,
        "problem": "gemm",
        "shape": dict(gemm.shape),
        "dtype": "bf16",
        "seed": 0,
        "device": {
            "kind": "cuda",
            "name": "NVIDIA H200",
            "arch": "sm_90a",
            "sm_count": 132,
            "memory_bytes": 150_000_000_000,
            "smem_per_block_bytes": 232_448,
            "smem_per_sm_bytes": 233_472,
            "registers_per_sm": 65_536,
            "max_threads_per_block": 1024,
            "l2_bytes": 62_914_560,
        },
        "environment": {"driver": "580.95", "triton": "3.6.0"},
        "name": "triton",
        "role": "kernel",
        "backend": "triton",
        "config": {"block_m": 128, "order": "grouped"},
        "median_us": 51.5,
        "low_us": 51.0,
        "high_us": 52.0,
        "ratio": 1.1,
        "ratio_low": 1.05,
        "ratio_high": 1.15,
        "tied_first": True,
        "verified": True,
        "error_relative": 0.001,
        "layout_us": 93.5,
        "sm_clock_mhz": 1755.0,
        "power_w": 600.0,
        "rounds": 15,
        "conditions": {"cache": "cold", "rounds": 15},
        "work": {"flops": 8192.0, "bytes": 3.0},
        "kernel_digest": "k1",
        "counts": {"build_error": 1, "ok": 1},
        "trials": 2,
        "tuning_s": 3.75,
        "search_seed": 3,
        "command": "tune problem=gemm",
    }


def test_round_trip(lines: list[str], tmp_path: Path) -> None:
    root = tmp_path / "results"
    root.mkdir()
    assert to_lines(load_shipped(_ship(root, lines)), "gemm", _work) == lines


def test_the_same_ranking_serves_both(engine: Engine, lines: list[str], tmp_path: Path) -> None:
    root = tmp_path / "results"
    root.mkdir()
    shipped = ranking(load_shipped(_ship(root, lines)))
    own = [row for row in ranking(engine) if row.verified]
    here = {"trial_id": None, "best_trial_id": None, "best_trial_us": None, "playoff_id": None}  # rows of one database only
    assert [replace(row, **here) for row in shipped] == [replace(row, source="shipped", **here) for row in own]
    assert len(ranking(load_shipped(root), Filters(problems=["gemm"], shapes=[{"m": 1}], backends=["triton"]))) == 2


def test_newer_lines_win_whatever_their_order(lines: list[str], tmp_path: Path) -> None:
    root = tmp_path / "results"
    root.mkdir()
    older = {**json.loads(lines[0]), "playoff": "older", "median_us": 1.0, "created_at": "2020-01-01T00:00:00+00:00"}
    rows = ranking(load_shipped(_ship(root, [*lines, json.dumps(older)])))
    assert [row.median_us for row in rows if row.name == "triton"] == [51.5, 51.5]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"schema_version": 2}, "schema_version is 2, not 1"), ({"created_at": "soon"}, "soon"), ({"device": {"kind": "cuda"}}, "TypeError")],
)
def test_a_line_that_cannot_be_read(lines: list[str], tmp_path: Path, change: dict, words: str) -> None:
    root = tmp_path / "results"
    root.mkdir()
    _ship(root, [lines[0], json.dumps(json.loads(lines[1]) | change | {"playoff": "other"})])
    with pytest.raises(StoreError, match=rf"nvidia-h200/gemm\.jsonl, line 2, is not .*{words}"):
        load_shipped(root)


def test_what_the_package_ships_can_be_read() -> None:
    for row in ranking(load_shipped()):
        assert row.source == "shipped"
        assert row.verified or row.role in ("roof", "step")
        assert row.status is Status.OK
        assert row.median_us is not None


def test_nothing_shipped(tmp_path: Path) -> None:
    assert ranking(load_shipped(tmp_path / "none")) == []
