"""The search space of a kernel: named values, conditions, hard constraints with their reason in words."""

import inspect
import random
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kerneldyno.core.records import Config
from kerneldyno.core.records import Value
from kerneldyno.core.records import canonical


Predicate = Callable[..., bool]
"""A function whose argument names are parameter names: `lambda block_m, stages: block_m * stages <= 512`."""


def _reads(predicate: Predicate) -> tuple[str, ...]:
    return tuple(inspect.signature(predicate).parameters)


@dataclass(frozen=True)
class Param:
    """One knob.

    Attributes:
        name: The key in a configuration.
        values: The values it can take, without repeats; numbers count as ordered by size, words and switches as unordered.
        doc: One line that says what it does.
        when: The knob exists only where this holds; it reads knobs declared before, by argument name.
            Where it does not hold the key is absent from the configuration.
    """

    name: str
    values: tuple[Value, ...]
    doc: str
    when: Predicate | None = None

    def __post_init__(self) -> None:
        """Refuse an empty or repeated list of values, which would make sizes and indices lie."""
        if not self.values:
            raise ValueError(f"parameter {self.name} has no values")
        if len({canonical(value) for value in self.values}) != len(self.values):
            raise ValueError(f"parameter {self.name} repeats a value: {self.values}")


@dataclass(frozen=True)
class Constraint:
    """A rule that a valid configuration keeps.

    It is checked where every knob that it reads exists in the configuration, and skipped elsewhere.

    Attributes:
        holds: True where the rule is kept; reads knobs by argument name.
        reason: The rule in words, with its number: "shared memory (stages x tiles) is at most 227 KB a block".
    """

    holds: Predicate
    reason: str


class Space:
    """Every configuration that a kernel can be built for.

    Args:
        params: The knobs; a knob's `when` may read only knobs before it.
        constraints: Hard rules; a configuration that breaks one is never measured.
        starts: Configurations to try first, because they were good somewhere (say where, beside them). A knob that one leaves
            out takes its first value; one that is not valid for this workload is passed over.
    """

    def __init__(self, params: Sequence[Param], constraints: Sequence[Constraint] = (), starts: Sequence[Config] = ()) -> None:
        self.params: Mapping[str, Param] = {param.name: param for param in params}
        self.constraints = tuple(constraints)
        if len(self.params) != len(params):
            raise ValueError(f"parameter names repeat: {[param.name for param in params]}")
        order = {name: position for position, name in enumerate(self.params)}
        self._when: dict[str, tuple[str, ...]] = {}
        for name, param in self.params.items():
            reads = _reads(param.when) if param.when else ()
            late = [other for other in reads if order.get(other, len(order)) >= order[name]]
            if late:
                raise ValueError(f"the condition of {name} reads {late}, not declared before it")
            self._when[name] = reads
        # a constraint is checked as soon as the last knob it reads is set, so that whole subtrees are cut early
        self._due: dict[str, list[tuple[Constraint, tuple[str, ...]]]] = {name: [] for name in self.params}
        for constraint in self.constraints:
            reads = _reads(constraint.holds)
            missing = [name for name in reads if name not in order]
            if missing or not reads:
                raise ValueError(f"the constraint '{constraint.reason}' reads {missing or 'no parameter'}")
            self._due[max(reads, key=order.__getitem__)].append((constraint, reads))
        stray = {name for start in starts for name in start if name not in order}
        if stray:
            raise ValueError(f"a start names {sorted(stray)}, which are no parameters")
        self._starts = tuple(starts)

    @property
    def starts(self) -> tuple[Config, ...]:
        """The configurations to try first that are valid here, completed, each once."""
        completed = {canonical(config): config for config in map(self.complete, self._starts) if config in self}
        return tuple(completed.values())

    def _active(self, param: Param, config: Config) -> bool:
        if param.when is None:
            return True
        reads = self._when[param.name]
        # a condition on a knob that is itself absent does not hold
        return all(name in config for name in reads) and bool(param.when(**{name: config[name] for name in reads}))

    def _broken(self, name: str, config: Config) -> Iterator[Constraint]:
        for constraint, reads in self._due[name]:
            if all(read in config for read in reads) and not constraint.holds(**{read: config[read] for read in reads}):
                yield constraint

    def problems(self, config: Mapping[str, Any]) -> list[str]:
        """Say in words everything that keeps a configuration out of the space; empty where it is valid."""
        found = [f"unknown parameter '{name}'" for name in config if name not in self.params]
        for name, param in self.params.items():
            if not self._active(param, config):
                if name in config:
                    found.append(f"{name} does not exist in this configuration")
            elif name not in config:
                found.append(f"{name} is missing")
            elif canonical(config[name]) not in {canonical(value) for value in param.values}:
                found.append(f"{name}={config[name]} is not one of {', '.join(map(str, param.values))}")
        if not found:
            found = [constraint.reason for name in self.params for constraint in self._broken(name, config)]
        return found

    def __contains__(self, config: object) -> bool:
        return isinstance(config, Mapping) and not self.problems(config)

    def __iter__(self) -> Iterator[Config]:
        """Enumerate the valid configurations, the last knob varying fastest."""
        names = list(self.params)

        def extend(position: int, config: dict[str, Value]) -> Iterator[Config]:
            if position == len(names):
                yield dict(config)
                return
            param = self.params[names[position]]
            if not self._active(param, config):
                yield from extend(position + 1, config)
                return
            for value in param.values:
                config[param.name] = value
                if next(self._broken(param.name, config), None) is None:
                    yield from extend(position + 1, config)
            del config[param.name]

        yield from extend(0, {})

    @cached_property
    def configs(self) -> tuple[Config, ...]:
        """All valid configurations, enumerated once (100,000 take about a second)."""
        return tuple(self)

    @property
    def size(self) -> int:
        """Number of valid configurations."""
        return len(self.configs)

    def sample(self, rng: random.Random) -> Config:
        """Draw a valid configuration, each with equal chance. Raises ValueError where there is none."""
        if not self.configs:
            raise ValueError("the space is empty: " + "; ".join(constraint.reason for constraint in self.constraints))
        return rng.choice(self.configs)

    def complete(self, config: Config) -> Config:
        """Drop knobs that do not exist beside the others, and add those that do at their first value."""
        done: dict[str, Value] = {}
        for name, param in self.params.items():
            if self._active(param, done):
                done[name] = config.get(name, param.values[0])
        return done

    def neighbours(self, config: Config) -> Iterator[Config]:
        """Give the valid configurations that differ from a valid one in one knob (and in what depends on it)."""
        for name, param in self.params.items():
            if name not in config:
                continue
            for value in param.values:
                if canonical(value) != canonical(config[name]):
                    other = self.complete({**config, name: value})
                    if other in self:
                        yield other
