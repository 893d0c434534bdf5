"""The CUDA backend's probe, the text it compiles, and what the compiler says to a bad one."""

import importlib.metadata

import pytest

from kerneldyno.backends import cuda
from kerneldyno.backends.cuda import _compile
from kerneldyno.testing.devices import H200


def test_usable_where_the_packages_are() -> None:
    found = cuda.probe(H200)
    assert found.usable
    assert set(found.versions) == {"cuda-bindings", "cuda-core", "nvrtc"}
    assert found.versions["cuda-bindings"] == importlib.metadata.version("cuda-bindings")


def test_without_a_gpu_it_names_the_backend_that_works() -> None:
    found = cuda.probe(None)
    assert not found.usable
    assert found.remedy == "device=cpu backend=c"


@pytest.mark.parametrize("missing", ["cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc"])
def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    version = importlib.metadata.version

    def without(package: str) -> str:
        if package.startswith(missing):
            raise importlib.metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", without)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = cuda.probe(H200)
    assert not found.usable
    assert ("NVRTC" if "nvrtc" in missing else missing) in found.reason
    assert found.remedy == "pip install 'kerneldyno[cuda]'"


def test_a_toolkit_stands_in_for_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("toolkit")
    (home / "lib64").mkdir()
    (home / "lib64" / "libnvrtc.so.13.0.88").touch()
    (home / "lib64" / "libnvrtc.so.13").symlink_to("libnvrtc.so.13.0.88")
    monkeypatch.setattr(cuda, "_NVRTC_WHEELS", ())
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert cuda.probe(H200).versions["nvrtc"] == "libnvrtc.so.13.0.88"


def test_the_constants_head_the_text() -> None:
    text = _compile.source_text("vector_add", "bf16", {"N": 5, "ODD": True}, {"LOAD": "Load::stream"})
    assert text.startswith("#define DTYPE_BF16 1\n#define LOAD Load::stream\nconstexpr int N = 5;\nconstexpr bool ODD = true;\n")


def test_a_refused_text_gives_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match=r"wrong\.cu\(1\): error"):
        _compile.compile_kernel("no such thing;", "wrong", {}, "sm_90a", blocks=1, threads=32, smem_bytes=0, tensors=())
