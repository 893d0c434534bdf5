import stat
from pathlib import Path

import pytest

from kerneldyno.backends import c
from kerneldyno.backends.c import _compile
from kerneldyno.core import Device
from kerneldyno.errors import Unavailable


SOURCE = "void nothing(void) {}"


def script(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_probe_names_the_compiler_and_its_version() -> None:
    found = c.probe(None)
    assert found.usable
    assert found.versions["cc"].split()[0] in ("gcc", "clang")
    assert found.versions["cc"].split()[1][0].isdigit()


def test_without_a_compiler_the_remedy_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = c.probe(None)
    assert not found.usable
    assert "PATH" in found.reason
    assert "apt-get install gcc" in found.remedy


def test_a_wrong_cc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert "no-such-compiler" in c.probe(None).reason


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        ("cc (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.", "gcc 12.2.0"),
        ("Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu", "clang 14.0.6"),
        ("gcc-13 (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0\nCopyright (C) 2023 Free Software Foundation, Inc.", "gcc 13.3.0"),
    ],
)
def test_versions_are_read_from_the_banner(tmp_path: Path, banner: str, version: str) -> None:
    assert _compile.compiler_version((script(tmp_path, f"cat <<'END'\n{banner}\nEND"),)) == version


def test_a_compiler_that_fails_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not run"):
        _compile.compiler_version((script(tmp_path, "exit 1"),))


def test_a_refused_source_shows_what_the_compiler_said() -> None:
    with pytest.raises(_compile.BuildError, match=r"wrong\.c:1:.*error") as caught:
        _compile.build_library("void wrong(void) { undeclared = 1; }", "wrong", {}, "x86_64", 1)
    assert "undeclared" in str(caught.value)


def test_a_long_message_is_shortened() -> None:
    with pytest.raises(_compile.BuildError, match="more characters") as caught:
        _compile.build_library("".join(f"void wrong{i}(void) {{ undeclared{i} = 1; }}\n" for i in range(200)), "wrong", {}, "x86_64", 1)
    assert len(str(caught.value)) < _compile.MESSAGE_LIMIT + 200


@pytest.mark.parametrize("said", ["fatal error: 'omp.h' file not found", "/usr/bin/ld: cannot find -lomp: No such file or directory"])
def test_missing_openmp_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str) -> None:
    monkeypatch.setenv("CC", script(tmp_path, f'echo "{said}" >&2; exit 1'))
    with pytest.raises(_compile.BuildError, match="libomp-dev"):
        _compile.build_library(SOURCE, "nothing", {}, "x86_64", 1)


def test_a_compiler_without_march_native_builds_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    real = _compile.find_compiler()[0]
    refuse = f'case "$*" in *march=native*) echo "error: unknown value native for -march" >&2; exit 1;; esac\nexec {real} "$@"'
    monkeypatch.setenv("CC", script(tmp_path, refuse))
    artifact = _compile.build_library(SOURCE, "nothing", {}, "x86_64", 1)
    assert artifact.binary.startswith(b"\x7fELF")
    _compile.load_function(artifact)()


def test_two_libraries_of_one_name_are_kept_apart() -> None:
    one, two = (
        _compile.load_function(_compile.build_library(f"int number(void) {{ return {value}; }}", "number", {}, "x86_64", 1))
        for value in (1, 2)
    )
    for function in (one, two):
        function.restype = _compile.ctypes.c_int
    assert (one(), two()) == (1, 2)


def test_threads_are_powers_of_two_and_the_cores() -> None:
    counts = {cores: _compile.threads_knob(Device("cpu", "x", "x86_64", sm_count=cores)).values for cores in (1, 2, 6, 64)}
    assert counts == {1: (1,), 2: (1, 2), 6: (1, 2, 4, 6), 64: (1, 2, 4, 8, 16, 32, 64)}


def test_run_before_prepare_says_so() -> None:
    launch = _compile.CLaunch(_compile.build_library(SOURCE, "nothing", {}, "x86_64", 1), lambda inputs, outputs: ())
    with pytest.raises(RuntimeError, match="prepare"):
        launch.run()
