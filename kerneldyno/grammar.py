"""Turns the words of a request into a `Plan`: types and checks every value, names the nearest valid one, and back to words."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kerneldyno.errors import RequestError
from kerneldyno.errors import unknown
from kerneldyno.jobs import device_word
from kerneldyno.jobs import jobs_of
from kerneldyno.jobs import selection_of
from kerneldyno.keys import INFO
from kerneldyno.keys import KeyInfo
from kerneldyno.keys import Keys
from kerneldyno.plan import Format
from kerneldyno.plan import Job
from kerneldyno.plan import Options
from kerneldyno.plan import Plan
from kerneldyno.plan import Selection
from kerneldyno.plan import Verb
from kerneldyno.registry import Registry
from kerneldyno.words import SHAPE
from kerneldyno.words import Request
from kerneldyno.words import duration_text
from kerneldyno.words import order_of
from kerneldyno.words import quote_value
from kerneldyno.words import read
from kerneldyno.words import seconds
from kerneldyno.words import word_of


DEFAULT_TRIALS = 60
"""Trials of a study where neither trials= nor budget= is given: what the comparison tables of this project use."""


def parse(argv: Sequence[str], default_kind: Callable[[], str] = lambda: "cpu") -> tuple[Plan, Registry]:
    """Understand a command line.

    Args:
        argv: The words after the command's name.
        default_kind: Gives the kind of device to use where nothing in the request decides it; called only then.

    Returns:
        The plan, and the registry (with the request's plugins) that it was checked against.

    Raises:
        errors.RequestError: What is wrong, the nearest valid name, and the list.
    """
    request = read(argv)
    values = _with_config(request)
    _check_keys(request.verb, values)
    texts, options = _typed(request.verb, values)
    registry = Registry(options.plugins)
    selection = Selection()
    jobs: tuple[Job, ...] = ()
    if request.verb in ("run", "list", "compare", "doctor"):
        for kind, names in (("problem", registry.problems()), ("backend", registry.backends())):
            for name in texts.get(kind, ()):
                if name not in names:
                    raise unknown(kind, name, names)
        devices = tuple(dict.fromkeys(device_word(word) for word in texts.get("device", ())))
        if request.verb == "run":
            jobs = jobs_of(texts, options, registry, devices, default_kind)
        else:
            selection = selection_of(texts, registry, devices)
    words = ([] if request.verb == "run" else [request.verb]) + [
        f"{key}={','.join(map(quote_value, texts[key]))}" for key in sorted(texts, key=order_of)
    ]
    return Plan(cast(Verb, request.verb), jobs, selection, options, tuple(words)), registry


def _with_config(request: Request) -> dict[str, list[str]]:
    values = dict(request.values)
    files = values.pop("config", [])
    if len(files) > 1:
        raise RequestError(f"config= takes one file, not {len(files)}")
    for file in files:
        from_file = _config_file(file)
        unknown_keys = [key for key in from_file if key not in INFO and not key.startswith(SHAPE)]
        if unknown_keys:
            raise RequestError(f"{file}: {unknown('key', unknown_keys[0], INFO)}")
        # a file may serve several verbs: what this one does not take is passed over
        taken = {key: value for key, value in from_file.items() if request.verb in _info(key).verbs}
        values = taken | values
    return values


def _config_file(file: str) -> dict[str, list[str]]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(Path(file).expanduser()), resolve=True)
    except OSError as error:
        raise RequestError(f"config={file}: {error.strerror or error}") from None
    except Exception as error:  # YAML and interpolation errors come from several families
        raise RequestError(f"config={file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise RequestError(f"config={file} must hold keys and values, as in `problem: gemm`")
    flat: dict[str, list[str]] = {}
    for key, value in content.items():
        if isinstance(value, dict) and key != "shape":
            raise RequestError(f"config={file}: {key} must be a value or a list of values")
        items = {f"{SHAPE}{dim}": item for dim, item in value.items()} if isinstance(value, dict) else {str(key): value}
        flat |= {name: [word_of(one) for one in (item if isinstance(item, list) else [item])] for name, item in items.items()}
    return flat


def _info(key: str) -> KeyInfo:
    return INFO["shape"] if key.startswith(SHAPE) else INFO[key]


def _check_keys(verb: str, values: Mapping[str, Sequence[str]]) -> None:
    for key in values:
        if key not in INFO and not key.startswith(SHAPE):
            raise unknown("key", key, [*INFO, "shape.DIM"])
        info = _info(key)
        if verb not in info.verbs:
            takes = ", ".join(name for name in INFO if verb in INFO[name].verbs)
            raise RequestError(f"`tune {verb}` does not take {key}=. It takes: {takes}.")
        if len(values[key]) > 1 and not info.many:
            joined = ",".join(values[key])
            raise RequestError(f"{key}={joined}: {key}= takes one value. If the comma is part of it, quote it: {key}='\"{joined}\"'.")


def _typed(verb: str, values: Mapping[str, list[str]]) -> tuple[dict[str, list[str]], Options]:
    """Let OmegaConf type every key but `shape.*`; return the canonical texts, and the options."""
    config = OmegaConf.structured(Keys)
    texts: dict[str, list[str]] = {}
    for key, given in values.items():
        if key.startswith(SHAPE):
            texts[key] = list(dict.fromkeys(given))
            continue
        info = INFO[key]
        try:
            OmegaConf.update(config, key, given if info.many else _switch(key, given[0]))
            value: Any = list(config[key]) if info.many else config[key]
        except OmegaConfBaseException:
            raise RequestError(f"{key}={','.join(given)}: {_expected(key)}") from None
        if info.minimum is not None and value < info.minimum:
            raise RequestError(f"{key}={given[0]}: the least is {info.minimum:g}")
        if info.choices and value not in info.choices:
            raise unknown(f"value for {key}=", given[0], info.choices)
        texts[key] = list(dict.fromkeys(value)) if info.many else [word_of(value)]
    durations = {key: seconds(key, str(config[key])) for key, info in INFO.items() if info.duration and config[key] is not None}
    texts |= {key: [duration_text(durations[key])] for key in durations if key in texts}
    if "sampler" in texts:
        texts["sampler"] = [_sampler(texts["sampler"][0])]
    if "plugin" in texts:
        texts["plugin"] = [str(Path(path).expanduser().resolve()) for path in texts["plugin"]]
    if config.format == "csv" and verb in ("list", "doctor"):
        raise RequestError(f"format=csv: `tune {verb}` prints a table or json")
    trials = config.trials if config.trials is not None or "budget" in durations else DEFAULT_TRIALS
    options = Options(
        trials=trials,
        budget_s=durations.get("budget"),
        seed=config.seed,
        sampler=texts.get("sampler", ["tpe"])[0],
        db=config.db,
        format=cast(Format, config.format),
        fresh=config.fresh,
        plugins=tuple(texts.get("plugin", ())),
        workers=config.workers,
        build_timeout_s=durations["build_timeout"],
        run_timeout_s=durations["run_timeout"],
        top=config.top,
        limit=config.limit,
    )
    return texts, options


def _switch(key: str, text: str) -> str | bool:
    """Booleans are the two words and nothing else: OmegaConf would take `1` and `yes` too."""
    if Keys.__dataclass_fields__[key].type is not bool:
        return text
    if text.lower() not in ("true", "false"):
        raise RequestError(f"{key}={text}: true or false is needed")
    return text.lower() == "true"


def _expected(key: str) -> str:
    kind = Keys.__dataclass_fields__[key].type
    return "a whole number is needed" if kind in (int, int | None) else "this is not a value that can be read (is `${` meant as it stands?)"


def _sampler(text: str) -> str:
    short = text.lower().removesuffix("sampler")
    if short != "tpe":
        from kerneldyno.tuner.sampler import check_sampler  # imports Optuna, half a second, so only where one is named

        check_sampler(short)
    return short
