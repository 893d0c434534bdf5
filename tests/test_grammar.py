"""The grammar: what words come to, what is refused and how it is said, and that the canonical words say the same again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from kerneldyno.cli import main
from kerneldyno.errors import RequestError
from kerneldyno.grammar import DEFAULT_TRIALS
from kerneldyno.grammar import parse
from kerneldyno.jobs import job_words
from kerneldyno.jobs import shortened
from kerneldyno.keys import INFO
from kerneldyno.plan import Options
from kerneldyno.registry import Registry
from kerneldyno.words import duration_text
from kerneldyno.words import quote_value
from kerneldyno.words import seconds
from kerneldyno.words import split_values


WRONG = [
    ("problem=sofmax", ["unknown problem 'sofmax'", "Did you mean 'softmax'?", "gemm"]),
    ("problem=softmax backend=trito", ["unknown backend 'trito'", "Did you mean 'triton'?"]),
    ("problem=softmax dtyp=bf16", ["unknown key 'dtyp'", "Did you mean 'dtype'?", "budget"]),
    ("problem=softmax dtype=fp8", ["unknown dtype of softmax 'fp8'", "bf16, fp16, fp32"]),
    ("problem=softmax shape.q=3", ["unknown shape key of softmax 'shape.q'", "shape.m, shape.n"]),
    ("problem=softmax shape.m=abc", ["shape.m=abc", "whole number", "rows"]),
    ("problem=softmax shape.m=1.5", ["shape.m=1.5", "whole number"]),
    ("problem=softmax shape.m=0", ["shape.m=0", "from 1 to"]),
    ("problem=attention shape.softcap=soft", ["shape.softcap=soft", "a number is needed"]),
    ("problem=attention shape.softcap=nan", ["shape.softcap=nan", "goes from 0"]),
    ("problem=attention shape.heads=64 shape.kv_heads=7", ["heads=64 is not a multiple of kv_heads=7", "Choose shape.kv_heads=8"]),
    ("problem=attention shape.window=-1", ["shape.window=-1", "from 0 to"]),
    ("problem=attention shape.batch=4096 shape.seq_q=1048576", ["GiB", "Choose a smaller shape"]),
    ("problem=moe_gemm shape.experts=4 shape.top_k=5", ["top_k=5", "experts=4"]),
    ("problem=gemm shape.layout=tn", ["'tn'", "Did you mean 'nt'?", "nn, nt"]),
    ("problem=gemm shape=llama3-70b-gateup-4k", ["Did you mean 'llama3-70b-gate-up-4k'?", "tune list problem=gemm"]),
    ("problem=softmax trials=many", ["trials=many", "whole number"]),
    ("problem=softmax trials=0", ["trials=0", "the least is 1"]),
    ("problem=softmax trials=1,2", ["trials= takes one value"]),
    ("problem=softmax budget=10x", ["budget=10x", "budget=10m"]),
    ("problem=softmax budget=0", ["more than zero"]),
    ("problem=softmax sampler=tpee", ["unknown sampler 'tpee'", "Did you mean 'tpe'?", "random"]),
    ("problem=softmax device=gpu", ["unknown device 'gpu'", "cuda:N"]),
    ("problem=softmax fresh=yes", ["fresh=yes", "true or false"]),
    ("problem=softmax format=jsn", ["'jsn'", "Did you mean 'json'?", "csv, json, table"]),
    ("problem=softmax seed=-1", ["seed=-1", "the least is 0"]),
    ("problem=softmax trials 200", ["Did you mean `trials=200`?"]),
    ("--trials=200", ["no options with hyphens", "`trials=200`"]),
    ("problem=softmax trials:200", ["Did you mean `trials=200`?"]),
    ("softmax", ["unknown verb 'softmax'", "problem=softmax"]),
    ("lst", ["unknown verb 'lst'", "Did you mean 'list'?"]),
    ("list doctor", ["'doctor' is a verb", "one request"]),
    ("problem=softmax problem=gemm", ["given twice", "problem=softmax,gemm"]),
    ("problem=", ["a value is missing"]),
    ("problem=softmax,", ["a value is missing beside a comma"]),
    ("problem=softmax db='a", ["a ' is missing"]),
    ("problem=softmax plugin=missing.py", ["there is no such file"]),
    ("problem=softmax config=missing.yaml", ["config=missing.yaml", "No such file"]),
    ("backend=c", ["which problem?", "softmax"]),
    ("compare shape.m=3", ["add problem="]),
    ("doctor trials=3", ["`tune doctor` does not take trials="]),
    ("list format=csv", ["table or json"]),
    ("problem=${nothing}", ["${nothing}"]),
]


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_request_is_named_with_what_is_right(line: str, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split(" ")) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tune: ")
    assert printed.err.count("\n") == 1
    for part in said:
        assert part in printed.err


def test_no_traceback_from_the_process_itself() -> None:
    done = subprocess.run([sys.executable, "-m", "kerneldyno", "problem=atention"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "unknown problem 'atention'" in done.stderr


def test_a_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run([sys.executable, "-m", "kerneldyno", "list"], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 128 + 13
    assert done.stderr == ""


def test_defaults_come_from_the_problem_and_the_device() -> None:
    plan, _ = parse(["problem=gemm"], lambda: "cpu")
    (job,) = plan.jobs
    assert (plan.verb, job.device, job.backends, job.workload.dtype) == ("run", "cpu", (), "fp32")
    assert job.workload.shape == {"m": 1024, "n": 1024, "k": 1024, "layout": "nt"}  # 4096 would take seconds a launch
    assert (plan.options.trials, plan.options.budget_s, plan.options.sampler) == (DEFAULT_TRIALS, None, "tpe")
    (job,) = parse(["problem=gemm"], lambda: "cuda")[0].jobs
    assert (job.device, job.workload.dtype) == ("cuda:0", "bf16")
    assert job.workload.shape == {"m": 4096, "n": 4096, "k": 4096, "layout": "nt"}


def test_a_dim_follows_the_one_it_is_like() -> None:
    def shape(words: str) -> dict[str, object]:
        return dict(parse(f"problem=attention device=cuda {words}".split())[0].jobs[0].workload.shape)

    assert shape("shape.heads=64 shape.head_dim=192 shape.seq_q=512 shape.softcap=30") == shape("") | {
        "heads": 64, "kv_heads": 64, "head_dim": 192, "head_dim_v": 192, "seq_q": 512, "seq_kv": 512, "softcap": 30.0,
    }  # fmt: skip
    given = shape("shape.heads=64 shape.kv_heads=8 shape.seq_q=1 shape.seq_kv=4096 shape.head_dim_v=64")
    assert (given["kv_heads"], given["seq_kv"], given["head_dim_v"]) == (8, 4096, 64)
    problem = Registry().load_problem("attention")
    assert shortened(problem, given, "cuda") == {"heads": 64, "kv_heads": 8, "seq_q": 1, "seq_kv": 4096, "head_dim_v": 64}
    assert shortened(problem, shape("shape.window=128"), "cuda") == {"window": 128}
    assert shortened(problem, shape(""), "cuda") == {}


def test_a_budget_alone_lifts_the_default_of_trials() -> None:
    options = parse(["problem=gemm", "budget=10m"])[0].options
    assert (options.trials, options.budget_s) == (None, 600.0)


def test_backends_decide_the_device_where_none_is_given() -> None:
    def never() -> str:
        raise AssertionError("the machine was asked although the backends decide")

    plan, _ = parse(["problem=softmax", "backend=c,triton"], never)
    assert [(job.device, job.backends, job.workload.dtype) for job in plan.jobs] == [
        ("cpu", ("c",), "fp32"),
        ("cuda:0", ("triton",), "bf16"),
    ]


def test_commas_sweep_the_product() -> None:
    plan, _ = parse("problem=gemm backend=c shape.m=1,16 shape.n=8,9,8 dtype=fp32,bf16 seed=5".split())
    assert [(job.workload.shape["m"], job.workload.shape["n"], job.workload.dtype) for job in plan.jobs] == [
        (m, n, dtype) for m in (1, 16) for n in (8, 9) for dtype in ("fp32", "bf16")
    ]
    assert {job.workload.seed for job in plan.jobs} == {5}


def test_a_named_shape_with_a_dim_of_its_own() -> None:
    plan, registry = parse("problem=gemm shape=llama3-70b-gate-up-4k shape.m=7".split())
    case = registry.load_problem("gemm").shapes()["llama3-70b-gate-up-4k"]
    (job,) = plan.jobs
    assert job.workload.shape["m"] == 7
    assert (job.workload.shape["n"], job.workload.shape["k"]) == (case["n"], case["k"])


def test_a_reading_verb_selects_with_partial_shapes() -> None:
    selection = parse("compare problem=gemm shape.m=1,16 backend=c device=cuda".split())[0].selection
    assert selection.shapes == ({"m": 1}, {"m": 16})
    assert (selection.problems, selection.backends, selection.devices) == (("gemm",), ("c",), ("cuda:0",))


def test_the_file_comes_first_and_words_win(tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text("problem: gemm\nbackend: [c]\nshape: {m: [1, 16], n: 32}\ntrials: 9\nfresh: true\nlimit: 3\n")
    plan, _ = parse([f"config={file}", "trials=11", "shape.n=64"])
    assert [(job.workload.shape["m"], job.workload.shape["n"]) for job in plan.jobs] == [(1, 64), (16, 64)]
    assert (plan.options.trials, plan.options.fresh) == (11, True)
    assert not any(word.startswith("config=") for word in plan.words)
    again, _ = parse(plan.words)
    assert again == plan


@pytest.mark.parametrize("text", ["- gemm", "problm: gemm", "problem: {a: 1}", "problem: [", "problem: ${missing}"])
def test_a_wrong_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text(text)
    with pytest.raises(RequestError, match=r"request\.yaml"):
        parse([f"config={file}"])


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("10m", 600.0), ("1h30m", 5400.0), ("1h", 3600.0), ("2m5s", 125.0)]
)
def test_durations(text: str, value: float) -> None:
    assert seconds("budget", text) == value


@pytest.mark.parametrize("text", ["", "m", "-3", "ten", "5d", "1m1h", "1 0"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(RequestError):
        seconds("budget", text)


@given(st.floats(min_value=1e-6, max_value=1e7))
def test_durations_read_back(value: float) -> None:
    assert seconds("budget", duration_text(value)) == pytest.approx(value, rel=1e-12)


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4))
def test_any_values_survive_quoting(values: list[str]) -> None:
    assert split_values("db", ",".join(map(quote_value, values))) == values


def test_brackets_and_quotes_keep_commas() -> None:
    assert split_values("db", "[a,b],{c,d},'e,f',g") == ["[a,b]", "{c,d}", "e,f", "g"]


_text = st.text(st.characters(codec="utf-8", exclude_characters="\0$"), min_size=1, max_size=10)
_requests = st.fixed_dictionaries(
    {"problem": st.just("gemm")},
    optional={
        "backend": st.lists(st.sampled_from(["c", "triton", "cuda"]), min_size=1, unique=True).map(",".join),
        "shape.m": st.lists(st.integers(1, 10**5).map(str), min_size=1, max_size=3).map(",".join),
        "shape.k": st.sampled_from(["1", "64,32"]),
        "shape.layout": st.sampled_from(["nn", "nt", "nn,nt"]),
        "dtype": st.sampled_from(["fp16", "bf16,fp32", "fp32"]),
        "device": st.sampled_from(["cpu", "cuda", "cuda:1", "cpu,cuda:0"]),
        "trials": st.integers(1, 10**6).map(str),
        "budget": st.integers(1, 10**6).map(lambda value: f"{value}s"),
        "seed": st.integers(0, 2**31).map(str),
        "db": _text.map(quote_value),
        "fresh": st.sampled_from(["true", "false", "True"]),
        "format": st.sampled_from(["table", "json", "csv"]),
        "top": st.integers(1, 9).map(str),
        "build_timeout": st.floats(0.5, 1e4).map(lambda value: f"{value:f}"),
    },
)


@settings(max_examples=60, deadline=None)
@given(_requests, st.randoms())
def test_canonical_words_mean_the_same(request_values: dict[str, str], rng) -> None:
    words = [f"{key}={value}" for key, value in request_values.items()]
    rng.shuffle(words)
    plan, _ = parse(words)
    again, _ = parse(plan.words)
    assert again == plan


def test_the_words_of_one_job_search_it_alone() -> None:
    plan, _ = parse("problem=gemm backend=c,triton shape.m=1,16 device=cpu trials=9 budget=90 seed=3 sampler=Random top=2".split())
    for job in plan.jobs:
        again, _ = parse(job_words(job, plan.options))
        assert again.jobs == (job,)
        assert again.options == plan.options


def test_every_option_has_a_default_that_its_key_declares() -> None:
    default, _ = parse(["list"])
    assert default.options == Options(trials=DEFAULT_TRIALS)
    assert set(INFO) >= {"trials", "budget", "seed", "sampler", "db", "device", "format", "config", "fresh", "plugin"}
