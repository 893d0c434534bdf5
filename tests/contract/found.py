"""What is in the tree, for the contracts to be applied to."""

import importlib
import pkgutil
from types import ModuleType

import kerneldyno.backends
import kerneldyno.problems
from kerneldyno.core import Value
from kerneldyno.core import Workload
from kerneldyno.registry import Ref


def problem_modules() -> dict[str, ModuleType]:
    """Import every problem."""
    names = [found.name for found in pkgutil.iter_modules(kerneldyno.problems.__path__) if not found.name.startswith("_")]
    return {name: importlib.import_module(f"kerneldyno.problems.{name}") for name in names}


def backend_modules() -> dict[str, ModuleType]:
    """Import every backend, not its DSL."""
    names = [found.name for found in pkgutil.iter_modules(kerneldyno.backends.__path__) if found.ispkg]
    return {name: importlib.import_module(f"kerneldyno.backends.{name}") for name in names}


def kernel_refs() -> dict[tuple[str, str], Ref]:
    """Find every kernel by (problem, backend), without importing it."""
    return {
        (found.name, backend): Ref(module=f"{module.__name__}.{found.name}")
        for backend, module in backend_modules().items()
        for found in pkgutil.iter_modules(module.__path__)
        if not found.name.startswith("_")
    }


def title(*words: str) -> str:
    """Make the name of a test class: ("gemm", "triton") gives TestGemmTriton."""
    return "Test" + "".join(part.title() for word in words for part in word.split("_"))


def gemm(m: int, n: int, k: int, dtype: str, layout: str = "nt", seed: int = 0) -> Workload:
    """Shorthand for a workload of gemm."""
    return Workload("gemm", {"m": m, "n": n, "k": k, "layout": layout}, dtype, seed)


def softmax(m: int, n: int, dtype: str, seed: int = 0) -> Workload:
    """Shorthand for a workload of softmax."""
    return Workload("softmax", {"m": m, "n": n}, dtype, seed)


def attention(
    batch: int, heads: int, kv_heads: int, seq_q: int, seq_kv: int, head_dim: int, dtype: str, seed: int = 0, **others: Value
) -> Workload:
    """Shorthand for a workload of attention; `head_dim_v` is as `head_dim`, the other dims are at their defaults where not given."""
    extent: dict[str, Value] = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "seq_q": seq_q,
        "seq_kv": seq_kv,
        "head_dim": head_dim,
    }
    dims = importlib.import_module("kerneldyno.problems.attention").dims
    defaults = {key: dim.default for key, dim in dims.items()} | {"head_dim_v": head_dim}
    return Workload("attention", {**defaults, **extent, **others}, dtype, seed)


def moe_gemm(
    tokens: int, experts: int, top_k: int, n: int, k: int, dtype: str, routing: str = "uniform", gather: bool = False, seed: int = 0
) -> Workload:
    """Shorthand for a workload of moe_gemm."""
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "n": n, "k": k, "routing": routing, "gather": gather}
    return Workload("moe_gemm", shape, dtype, seed)


def vector_add(n: int, dtype: str, seed: int = 0) -> Workload:
    """Shorthand for a workload of vector_add."""
    return Workload("vector_add", {"n": n}, dtype, seed)
