"""What TileLang generates in float32, run on the CPU: the numbers, at sizes that divide nothing too."""

import shutil

import numpy as np
import pytest

from kerneldyno.core import Workload
from kerneldyno.testing.devices import H200


pytest.importorskip("tilelang")
if shutil.which("g++") is None:
    pytest.skip("g++ runs the generated source", allow_module_level=True)

from kerneldyno.backends.tilelang import gemm
from kerneldyno.backends.tilelang import softmax
from kerneldyno.backends.tilelang import vector_add
from tests.backends.tilelang import emulate


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def poisoned(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, dtype=np.float32)


def reference_softmax(x: np.ndarray) -> np.ndarray:
    exact = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return exact / exact.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("n", [1, 2 * 128 * 4 + 77])
def test_vector_add(n, tmp_path):
    workload = Workload("vector_add", {"n": n}, "fp32")
    config = {"threads": 128, "vector_bytes": 16, "unroll": 1}
    assert config in vector_add.space(workload, H200)
    x, y, out = normal(n), normal(n, seed=1), poisoned(n)
    emulate.run(vector_add.program(workload, config), tmp_path, {"x": x, "y": y, "out": out})
    np.testing.assert_array_equal(out, x + y)


@pytest.mark.parametrize(
    ("m", "n", "config"),
    [
        (5, 1003, {"algorithm": "held", "row_threads": 64, "rows": 2, "vector_bytes": 4}),
        (3, 1000, {"algorithm": "held", "row_threads": 128, "rows": 1, "vector_bytes": 16}),
        (3, 1, {"algorithm": "held", "row_threads": 32, "rows": 4, "vector_bytes": 4}),
        # three of five steps kept; then the last of two steps kept and partial
        (2, 4610, {"algorithm": "streamed", "row_threads": 256, "vector_bytes": 8, "unroll": 2, "kept_kb": 0}),
        (2, 30004, {"algorithm": "streamed", "row_threads": 256, "vector_bytes": 16, "unroll": 4, "kept_kb": 48}),
        (1, 4099, {"algorithm": "streamed", "row_threads": 256, "vector_bytes": 4, "unroll": 1, "kept_kb": 48}),
    ],
)
def test_softmax(m, n, config, tmp_path):
    workload = Workload("softmax", {"m": m, "n": n}, "fp32")
    assert not softmax.space(workload, H200).problems(config)
    # the last row starts low: a running maximum that forgot a row's end would overflow or lose it
    x, y = normal(m, n) * 4, poisoned(m, n)
    x[-1] = np.linspace(-80, 80, n)
    emulate.run(softmax.program(workload, config), tmp_path, {"x": x, "y": y})
    np.testing.assert_allclose(y, reference_softmax(x), rtol=3e-5, atol=1e-12)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((65, 131, 37), {"block_m": 64, "block_n": 64, "block_k": 16, "stages": 2, "panel": 4}),
        ((130, 68, 40), {"block_m": 128, "block_n": 64, "block_k": 8, "stages": 3, "panel": 1}),
    ],
)
def test_gemm(layout, shape, config, tmp_path):
    m, n, k = shape
    workload = Workload("gemm", {"m": m, "n": n, "k": k, "layout": layout}, "fp32")
    assert not gemm.space(workload, H200).problems(config)
    a, b, c = normal(m, k), normal(*((n, k) if layout == "nt" else (k, n)), seed=1), poisoned(m, n)
    emulate.run(gemm.program(workload, config), tmp_path, {"a": a, "b": b, "c": c})
    np.testing.assert_allclose(c, a.astype(np.float64) @ (b.T if layout == "nt" else b), rtol=0, atol=2e-5)
