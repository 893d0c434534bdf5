"""Optuna's samplers over a space with hard constraints: only valid configurations, none twice."""

import inspect
import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.distributions import CategoricalDistribution
from optuna.distributions import IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from kerneldyno.core import Config
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Value
from kerneldyno.core import canonical
from kerneldyno.errors import RequestError
from kerneldyno.errors import unknown


optuna.logging.set_verbosity(optuna.logging.ERROR)


def sampler_names() -> Mapping[str, type[BaseSampler]]:
    """Optuna's single-objective samplers by short name: {"tpe": TPESampler, "random": RandomSampler, ...}."""
    classes = {name: getattr(optuna.samplers, name) for name in optuna.samplers.__all__ if name.endswith("Sampler")}
    multi = {"NSGAIISampler", "NSGAIIISampler", "BaseSampler", "BaseGASampler", "PartialFixedSampler"}
    return {name.removesuffix("Sampler").lower(): found for name, found in classes.items() if name not in multi}


def check_sampler(name: str) -> None:
    """Raise RequestError, with the nearest name, where Optuna has no such sampler."""
    if name.lower().removesuffix("sampler") not in sampler_names():
        raise unknown("sampler", name, sampler_names())


class _Knob:
    """A parameter as Optuna sees it: words and switches have no order; numbers go by rank, so that 16, 32, 64, 128 are evenly apart."""

    def __init__(self, param: Param) -> None:
        self.unordered = any(isinstance(value, str | bool) for value in param.values)
        self.values: tuple[Any, ...] = param.values if self.unordered else tuple(sorted(param.values))  # pyright: ignore[reportArgumentType]
        self._ranks = {canonical(value): rank for rank, value in enumerate(self.values)}
        self.distribution: BaseDistribution = (
            CategoricalDistribution(self.values) if self.unordered else IntDistribution(0, len(self.values) - 1)
        )

    def rank(self, value: Value) -> int:
        """Place of a value in the order."""
        return self._ranks[canonical(value)]

    def internal(self, value: Value) -> Value:
        """What stands for a value in Optuna."""
        return value if self.unordered else self.rank(value)

    def suggest(self, trial: optuna.Trial, name: str) -> Value:
        """Let the sampler choose a value."""
        if self.unordered:
            chosen: Any = trial.suggest_categorical(name, self.values)
            return chosen
        return self.values[trial.suggest_int(name, 0, len(self.values) - 1)]


class Asker:
    """Proposes configurations of a space and learns from what came of them.

    What the sampler proposes is mapped to the nearest configuration that is valid and was not proposed before. A sampler
    sees the result under the configuration that was measured, not under the one that it proposed.

    Args:
        space: The space.
        sampler: One of `sampler_names`.
        seed: Makes the sequence a function of the results told, and of nothing else.

    Raises:
        RequestError: The sampler is unknown or cannot be used here.
    """

    def __init__(self, space: Space, sampler: str, seed: int) -> None:
        check_sampler(sampler)
        self.space = space
        self._knobs = {name: _Knob(param) for name, param in space.params.items()}
        self._study = optuna.create_study(sampler=self._make(sampler.lower().removesuffix("sampler"), seed))
        self._rng = random.Random(seed)
        self._left = np.ones(space.size, dtype=bool)
        self._position = {canonical(config): index for index, config in enumerate(space.configs)}
        self._coordinates = np.array([self._encode(config) for config in space.configs]).reshape(space.size, -1)
        self._words = np.array([knob.unordered for knob in self._knobs.values()])
        self._asked: dict[str, tuple[optuna.Trial, bool]] = {}
        for start in space.starts:
            self._study.enqueue_trial(self._internal(start))

    def _internal(self, config: Config) -> dict[str, Any]:
        return {name: self._knobs[name].internal(value) for name, value in config.items()}

    def _make(self, name: str, seed: int) -> BaseSampler:
        found = sampler_names()[name]
        accepted = inspect.signature(found).parameters
        arguments: dict[str, Any] = {"seed": seed} if "seed" in accepted else {}
        if name == "tpe":
            # knobs act together (a tile and its warps), and several configurations are under way at once
            arguments |= {"multivariate": True, "group": True, "constant_liar": True}
        if name == "grid":
            arguments["search_space"] = {key: [knob.internal(value) for value in knob.values] for key, knob in self._knobs.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optuna marks multivariate and group as experimental
                return found(**arguments)
        except (ImportError, ModuleNotFoundError) as error:
            raise RequestError(f"sampler={name} needs a package that is not here: {error}") from error

    def _encode(self, config: Config) -> list[float]:
        # a knob's rank over its range, NaN where it does not exist
        return [
            knob.rank(config[name]) / max(len(knob.values) - 1, 1) if name in config else float("nan") for name, knob in self._knobs.items()
        ]

    def _nearest_left(self, config: Config) -> Config | None:
        left = np.flatnonzero(self._left)
        if not len(left):
            return None
        index = self._position.get(canonical(config))
        if index is None or not self._left[index]:
            wanted = np.array(self._encode(config))
            gap = np.abs(self._coordinates[left] - wanted)
            gap[:, self._words] = np.where(gap[:, self._words] > 0, 1.0, gap[:, self._words])
            # a knob that only one of the two has counts as wholly different
            one_lacks = np.isnan(self._coordinates[left]) != np.isnan(wanted)
            gap = np.where(one_lacks, 1.0, np.nan_to_num(gap, nan=0.0))
            distance = gap.sum(axis=1)
            index = int(self._rng.choice(left[distance <= distance.min() + 1e-9].tolist()))
        return self.space.configs[index]

    def ask(self) -> Config | None:
        """Propose the next configuration; None where every valid one was proposed."""
        if not self._left.any():
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._study.ask()
            proposed: dict[str, Value] = {}
            for name, param in self.space.params.items():
                # a knob that does not exist beside those chosen so far is not asked for
                if name in self.space.complete({**proposed, name: param.values[0]}):
                    proposed[name] = self._knobs[name].suggest(trial, name)
        config = self._nearest_left(proposed)
        assert config is not None
        self._left[self._position[canonical(config)]] = False
        self._asked[canonical(config)] = (trial, canonical(config) == canonical(proposed))
        return config

    def tell(self, config: Config, median_us: float | None) -> None:
        """Say what came of a configuration that was asked for.

        Args:
            config: The configuration.
            median_us: Its time; None where it failed, which counts as worse than any time.
        """
        trial, as_proposed = self._asked.pop(canonical(config))
        state = TrialState.COMPLETE if median_us is not None else TrialState.PRUNED
        # the logarithm: half the time is the same gain at every scale
        value = float(np.log2(median_us)) if median_us is not None else None
        if as_proposed:
            self._study.tell(trial, value, state=state)
            return
        self._study.tell(trial, state=TrialState.FAIL)
        used = {name: self._knobs[name].distribution for name in config}
        measured = optuna.trial.create_trial(state=state, params=self._internal(config), distributions=used, value=value)
        self._study.add_trial(measured)
