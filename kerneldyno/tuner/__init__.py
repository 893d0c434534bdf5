"""The search: asks for configurations, has them compiled and measured, keeps what came of them, holds the playoff."""

from kerneldyno.tuner.run import RunResult
from kerneldyno.tuner.run import run


__all__ = ["RunResult", "run"]
