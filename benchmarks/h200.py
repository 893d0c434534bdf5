"""Makes the results that ship with the package, in pieces of a few minutes of GPU time.

    python benchmarks/h200.py db=h200.db seconds=500 out=kerneldyno/results/nvidia-h200
    python benchmarks/h200.py db=h200.db only=gemm

Each case is one `tune` command, which anyone can run alone. The script is resumable: cases run in the order of CASES until
the seconds are used up; run again with the same database, it goes on where it stopped (a finished case measures nothing).
At the end it writes one JSON-lines file for each problem to `out`, a line for each verified best and each baseline.
"""

import subprocess
import sys
import time
from pathlib import Path

from kerneldyno.registry import Registry
from kerneldyno.store.engine import open_store
from kerneldyno.store.shipped import to_lines


BACKENDS = "triton,tilelang,cuda"
CASES: tuple[tuple[str, ...], ...] = (
    # power-bound: one trial's median depends on how hot the chip was, so more of them meet in the playoff
    ("problem=gemm", "shape.m=8192", "shape.n=8192", "shape.k=8192", "trials=30", "top=4"),
    ("problem=gemm", "shape.m=4096", "shape.n=4096", "shape.k=4096", "trials=30"),
    ("problem=gemm", "shape.m=1000", "shape.n=1003", "shape.k=517", "trials=30"),
    ("problem=attention", "shape=fa3-hd128-full-4k", "trials=24"),
    ("problem=attention", "shape=fa3-hd128-causal-4k", "trials=24"),
    ("problem=attention", "shape=fa3-hd128-full-16k", "trials=24"),
    ("problem=attention", "shape=fa3-hd128-causal-16k", "trials=24"),
    ("problem=attention", "shape=llama3-70b-decode-16x32k", "trials=24"),
    # one command, so that the compile processes are started once
    (
        "problem=moe_gemm",
        "shape=mixtral-8x7b-up-4k,qwen3-235b-a22b-up-4k,deepseek-v3-up-4k,qwen3-235b-a22b-up-16,deepseek-v3-up-16",
        "trials=14",
    ),
    ("problem=softmax", "shape.m=4096", "shape.n=4096", "trials=60"),
    ("problem=softmax", "shape.m=16384", "shape.n=8192", "trials=60"),
    ("problem=softmax", "shape.m=8192", "shape.n=131072", "trials=60"),
)
COMMON = (f"backend={BACKENDS}", "dtype=bf16", "device=cuda:0")
LEAST_S = 60.0
"""A case is begun only with this much time left: workers start, inputs are made and the playoff is held in about a minute."""


def run(database: str, only: str, seconds: float) -> list[str]:
    """Run the cases that are wanted until the time is used up; return those that were not begun."""
    began = time.monotonic()
    left: list[str] = []
    for case in CASES:
        words = (*case, *COMMON)
        if only and not any(part in " ".join(case) for part in only.split(",")):
            continue
        if time.monotonic() - began > seconds - LEAST_S:
            left.append(" ".join(words))
            continue
        started = time.monotonic()
        print("$ tune " + " ".join(words), flush=True)
        done = subprocess.run([sys.executable, "-m", "kerneldyno", *words, f"db={database}"], check=False)
        print(f"exit {done.returncode} after {time.monotonic() - started:.0f} s\n", flush=True)
    return left


def ship(database: str, out: Path) -> None:
    """Write the database's newest playoffs as JSON lines, one file for each problem."""
    engine = open_store(database, readonly=True)
    out.mkdir(parents=True, exist_ok=True)
    for problem in Registry().problems():
        lines = to_lines(engine, problem)
        if lines:
            (out / f"{problem}.jsonl").write_text("".join(f"{line}\n" for line in lines))
            print(f"{len(lines)} lines in {out / problem}.jsonl")


def main() -> int:
    """Run as the module's docstring says."""
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    unknown = set(given) - {"db", "only", "seconds", "out"}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}. Valid: db, only, seconds, out.", file=sys.stderr)
        return 2
    database = given.get("db", "h200.db")
    left = run(database, given.get("only", ""), float(given.get("seconds", "1e9")))
    if "out" in given:
        ship(database, Path(given["out"]))
    for words in left:
        print(f"not begun: tune {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
