"""The budgets: right kernels of any summation order pass, and the usual shortcuts do not."""

from collections.abc import Callable

import pytest
import torch

from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.core.error import error_between
from kerneldyno.problems import gemm
from kerneldyno.problems import softmax
from kerneldyno.problems import vector_add


SIXTEEN_BITS = ("bf16", "fp16")
EVERY_DTYPE = ("bf16", "fp16", "fp32")


def product(dtype: str, k: int, m: int = 48, n: int = 40, layout: str = "nt") -> Workload:
    return Workload("gemm", {"m": m, "n": n, "k": k, "layout": layout}, dtype)


def admits(problem: object, workload: Workload, compute: Callable[[Tensors], torch.Tensor]) -> bool:
    """Say whether the budget admits what `compute` makes of the inputs."""
    inputs = problem.inputs(workload, "cpu")
    reference = problem.reference(workload, inputs)
    (key,) = reference
    error = error_between({key: compute(inputs)}, reference)
    return problem.tolerance(workload, inputs, reference).admits(error)


def in_order(inputs: Tensors, step: int = 1) -> torch.Tensor:
    """Sum `step` products at a time in float32, one after the other: the order with the largest error."""
    a, b = inputs["a"].float(), inputs["b"].float()
    total = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], step):
        total += a[:, start : start + step] @ b[:, start : start + step].T
    return total.to(inputs["a"].dtype)


def split(inputs: Tensors, parts: int, partial: torch.dtype) -> torch.Tensor:
    """Sum `parts` slices of k apart, round each to `partial`, and add them."""
    a, b = inputs["a"].float(), inputs["b"].float()
    sums = [a[:, part::parts] @ b[:, part::parts].T for part in range(parts)]
    return torch.stack([one.to(partial) for one in sums]).float().sum(dim=0).to(inputs["a"].dtype)


def low_accumulator(inputs: Tensors, step: int = 16) -> torch.Tensor:
    """Round the running sum to the inputs' dtype every `step` products."""
    a, b = inputs["a"], inputs["b"]
    total = torch.zeros(a.shape[0], b.shape[0], dtype=a.dtype)
    for start in range(0, a.shape[1], step):
        total = (total.float() + a[:, start : start + step].float() @ b[:, start : start + step].float().T).to(a.dtype)
    return total


def tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 10 stored bits of TF32, to nearest."""
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("k", [1, 64, 3000])
def test_gemm_admits_any_order_in_float32(dtype: str, k: int) -> None:
    workload = product(dtype, k)
    assert admits(gemm, workload, in_order)
    assert admits(gemm, workload, lambda inputs: in_order(inputs, step=32))
    assert admits(gemm, workload, lambda inputs: split(inputs, 7, torch.float32))


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 3), (2, 1)])
@pytest.mark.parametrize("k", [64, 1500])
def test_gemm_admits_any_order_where_products_cancel(dtype: str, m: int, n: int, k: int) -> None:
    for seed in range(6):
        workload = Workload("gemm", {"m": m, "n": n, "k": k, "layout": "nt"}, dtype, seed)
        assert admits(gemm, workload, in_order), f"seed {seed}"


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("k", [256, 1024, 4096])
def test_gemm_refuses_sums_in_16_bits(dtype: str, k: int) -> None:
    workload = product(dtype, k)
    assert not admits(gemm, workload, low_accumulator)
    assert not admits(gemm, workload, lambda inputs: split(inputs, 4, inputs["a"].dtype))
    assert not admits(gemm, workload, lambda inputs: split(inputs, 2, inputs["a"].dtype))


@pytest.mark.parametrize("k", [1, 64, 1024, 16384])
def test_gemm_refuses_tf32_for_float32(k: int) -> None:
    assert not admits(gemm, product("fp32", k, m=32, n=32), lambda inputs: tf32(inputs["a"]) @ tf32(inputs["b"]).T)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_gemm_refuses_a_dropped_tail(dtype: str) -> None:
    assert not admits(gemm, product(dtype, 1000), lambda inputs: inputs["a"][:, :992] @ inputs["b"][:, :992].T)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("k", [64, 4096])
def test_gemm_refuses_one_wrong_element(dtype: str, k: int) -> None:
    def compute(inputs: Tensors) -> torch.Tensor:
        c = (inputs["a"] @ inputs["b"].T).double()
        c[17, 23] += 0.01 * float(c.abs().max())
        return c

    assert not admits(gemm, product(dtype, k), compute)


def test_gemm_budget_does_not_depend_on_the_process_settings() -> None:
    workload = product("bf16", 512)
    inputs = gemm.inputs(workload, "cpu")
    reference = gemm.reference(workload, inputs)
    budget = gemm.tolerance(workload, inputs, reference)
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction
    try:
        torch.set_float32_matmul_precision("medium")
        matmul.allow_bf16_reduced_precision_reduction = True
        assert gemm.tolerance(workload, inputs, reference) == budget
        assert torch.get_float32_matmul_precision() == "medium"
        assert matmul.allow_bf16_reduced_precision_reduction is True
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.allow_bf16_reduced_precision_reduction = before[1]


def rows(dtype: str, m: int, n: int) -> Workload:
    return Workload("softmax", {"m": m, "n": n}, dtype)


def online(inputs: Tensors, step: int, base_two: bool) -> torch.Tensor:
    """Compute as a streaming kernel does: block by block with a running maximum, all in float32."""
    x = inputs["x"].float() * (1.4426950408889634 if base_two else 1.0)
    power = torch.exp2 if base_two else torch.exp
    peak, total = torch.full((len(x), 1), -torch.inf), torch.zeros(len(x), 1)
    for start in range(0, x.shape[1], step):
        block = x[:, start : start + step]
        higher = torch.maximum(peak, block.amax(dim=1, keepdim=True))
        total = total * power(peak - higher)
        for column in range(block.shape[1]):  # one after the other: the order with the largest error
            total += power(block[:, column : column + 1] - higher)
        peak = higher
    return (power(x - peak) * (1.0 / total)).to(inputs["x"].dtype)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 5), (16, 1000), (4, 4096)])
@pytest.mark.parametrize("base_two", [False, True])
def test_softmax_admits_any_order_in_float32(dtype: str, m: int, n: int, base_two: bool) -> None:
    assert admits(softmax, rows(dtype, m, n), lambda inputs: online(inputs, 256, base_two))


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_softmax_admits_extreme_inputs(dtype: str) -> None:
    workload = rows(dtype, 8, 300)
    inputs = {"x": softmax.inputs(workload, "cpu")["x"] * 15000}  # beyond what exp of fp16 or float32 holds
    assert bool(inputs["x"].isfinite().all())
    reference = softmax.reference(workload, inputs)
    assert bool(reference["y"].isfinite().all())
    assert reference["y"].sum(dim=1).tolist() == pytest.approx([1.0] * 8)
    budget = softmax.tolerance(workload, inputs, reference)
    assert budget.admits(error_between({"y": online(inputs, 64, base_two=False)}, reference))
    assert not budget.admits(error_between({"y": torch.full((8, 300), 1 / 300)}, reference))


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("n", [64, 4096])
def test_softmax_refuses_what_is_not_normalised(dtype: str, n: int) -> None:
    workload = rows(dtype, 32, n)

    def scaled(factor: float) -> Callable[[Tensors], torch.Tensor]:
        return lambda inputs: (inputs["x"].double().softmax(dim=1) * factor).to(inputs["x"].dtype)

    assert admits(softmax, workload, scaled(1.0))
    assert not admits(softmax, workload, scaled(1.01))
    assert not admits(softmax, workload, scaled(0.99))
    assert not admits(softmax, workload, lambda inputs: inputs["x"].float().exp().to(inputs["x"].dtype))


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_softmax_refuses_a_sum_without_the_tail(dtype: str) -> None:
    def compute(inputs: Tensors) -> torch.Tensor:
        powers = (inputs["x"].float() - inputs["x"].float().amax(dim=1, keepdim=True)).exp()
        return (powers / powers[:, :992].sum(dim=1, keepdim=True)).to(inputs["x"].dtype)

    assert not admits(softmax, rows(dtype, 32, 1003), compute)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_softmax_refuses_a_sum_in_16_bits(dtype: str) -> None:
    def compute(inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        powers = (x - x.amax(dim=1, keepdim=True)).exp()
        total = torch.zeros(len(x), 1, dtype=x.dtype)
        for column in range(x.shape[1]):
            total += powers[:, column : column + 1]
        return powers / total

    assert not admits(softmax, rows(dtype, 16, 4096), compute)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_vector_add_admits_the_sum_and_refuses_a_coarser_one(dtype: str) -> None:
    workload = Workload("vector_add", {"n": 10_007}, dtype)
    coarser = {"fp32": torch.float16, "fp16": torch.bfloat16, "bf16": torch.float8_e4m3fn}[dtype]
    assert admits(vector_add, workload, lambda inputs: (inputs["x"].float() + inputs["y"].float()).to(inputs["x"].dtype))
    assert not admits(vector_add, workload, lambda inputs: (inputs["x"] + inputs["y"]).to(coarser).to(inputs["x"].dtype))
    assert not admits(vector_add, workload, lambda inputs: inputs["x"])


@pytest.mark.parametrize(
    ("problem", "shape"),
    [(softmax, {"m": 30, "n": 700}), (vector_add, {"n": 5000}), (gemm, {"m": 50, "n": 60, "k": 70, "layout": "nn"})],
    ids=["softmax", "vector_add", "gemm"],
)
def test_row_blocks_do_not_change_the_reference(problem: object, shape: dict[str, int | str], monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(problem.name, shape, "bf16")
    inputs = problem.inputs(workload, "cpu")
    (key,) = whole = problem.reference(workload, inputs)
    monkeypatch.setattr("kerneldyno.problems._common.BLOCK_ELEMENTS", 1500)
    blocked = problem.reference(workload, inputs)
    torch.testing.assert_close(blocked[key], whole[key], rtol=1e-6, atol=1e-6)
    from_blocks, from_whole = (problem.tolerance(workload, inputs, {key: answer[key]}) for answer in (blocked, whole))
    assert from_blocks.relative == pytest.approx(from_whole.relative, rel=1e-3)
