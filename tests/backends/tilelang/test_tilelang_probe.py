"""What the TileLang backend says about a machine."""

import importlib.metadata

import pytest

from kerneldyno.backends import tilelang as backend
from kerneldyno.testing.devices import H200


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with TileLang and nothing else: empty search path, no toolkit, no wheels of nvcc."""
    installed = {"tilelang": "0.1.15"}

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    def files(package):
        version(package)
        return [importlib.metadata.PackagePath("nvidia/cu13/bin/nvcc")]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setattr(importlib.metadata.PackagePath, "locate", lambda path: tmp_path / path, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend, "_TOOLKIT_NVCC", tmp_path / "toolkit/bin/nvcc")
    return installed, tmp_path


def executable(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_without_tilelang(bare):
    installed, _ = bare
    installed.clear()
    assert backend.probe(H200).remedy == "pip install 'kerneldyno[tilelang]'"


def test_without_nvcc(bare):
    found = backend.probe(H200)
    assert not found.usable
    assert "nvcc" in found.reason
    assert "kerneldyno[tilelang]" in found.remedy


def test_nvcc_on_the_path_comes_before_the_wheel(bare):
    installed, root = bare
    installed["nvidia-cuda-nvcc"] = "13.0.88"
    executable(root / "nvidia/cu13/bin/nvcc")
    assert backend.find_nvcc() == root / "nvidia/cu13/bin/nvcc"
    executable(root / "bin/nvcc")
    assert backend.find_nvcc() == root / "bin/nvcc"


def test_a_wheel_of_nvcc_needs_its_parts(bare):
    installed, root = bare
    installed["nvidia-cuda-nvcc"] = "13.0.88"
    executable(root / "nvidia/cu13/bin/nvcc")
    executable(root / "bin/g++")
    assert "nvidia-nvvm" in backend.probe(H200).reason
    installed.update(dict.fromkeys(("nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl"), "13.0"))
    found = backend.probe(H200)
    assert found.usable
    assert found.versions == {"tilelang": "0.1.15", "nvcc": "13.0.88"}


def test_a_cuda_home_without_nvcc_is_named(bare, monkeypatch):
    _, root = bare
    executable(root / "bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    found = backend.probe(H200)
    assert not found.usable
    assert "/nowhere" in found.remedy


def test_without_a_host_compiler(bare):
    _, root = bare
    executable(root / "bin/nvcc")
    assert "C++ compiler" in backend.probe(H200).reason


def test_without_a_gpu():
    if backend.find_nvcc() is None:
        pytest.skip("nvcc is missing, which is said first")
    found = backend.probe(None)
    assert not found.usable
    assert found.remedy == "device=cpu backend=c"
