"""Every CUDA kernel on the real GPU, at many shapes: drawn configurations, built beside, run in one process that is replaced if it dies.

One failure is one line. Run it alone: `python -m pytest -q tests/gpu`.
"""

import random
from dataclasses import dataclass

import pytest

from kerneldyno.core import Config
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.errors import Unavailable
from kerneldyno.errors import Unsupported
from kerneldyno.measure.device import gpus
from kerneldyno.registry import Ref
from kerneldyno.registry import resolve
from kerneldyno.testing.lab import draw
from kerneldyno.testing.lab import shared_lab
from tests.contract.found import attention
from tests.contract.found import backend_modules
from tests.contract.found import gemm
from tests.contract.found import kernel_refs
from tests.contract.found import moe_gemm
from tests.contract.found import problem_modules
from tests.contract.found import softmax
from tests.contract.found import vector_add
from tests.drawn import drawn_attentions
from tests.drawn import drawn_moe_gemms


pytestmark = pytest.mark.gpu

DEVICES = gpus()
if not DEVICES:
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

SAMPLES = {"tilelang": 1}
"""Configurations a workload; TileLang takes 4 s to build one, the others well below one second."""
DEFAULT_SAMPLES = 3
DRAWN = 200
"""Workloads of a problem whose shapes are drawn, one configuration each."""

GEMM = (
    (1, 1, 1),
    (3, 5, 7),
    (17, 33, 65),
    (129, 130, 8),
    (128, 256, 64),
    (1000, 1003, 517),
    (4096, 1, 64),
    (1, 4096, 1000),
    (64, 2112, 7168),
    (16, 2880, 2880),
    (512, 640, 1096),
    (2048, 1536, 512),
)
SOFTMAX = (
    (1, 1),
    (3, 5),
    (7, 1000),
    (33, 4097),
    (257, 1023),
    (100, 2880),
    (4096, 128),
    (2048, 4096),
    (5, 32768),
    (64, 65536),
    (16, 131072),
    (1, 128256),
)
VECTOR_ADD = (1, 7, 1003, 4096, 2**20, 2**20 + 3, 3_000_001)
DTYPES = ("bf16", "fp16", "fp32")

WORKLOADS = {
    "gemm": [gemm(*extent, dtype, layout) for extent in GEMM for dtype in DTYPES for layout in ("nt", "nn")],
    "softmax": [softmax(*extent, dtype) for extent in SOFTMAX for dtype in DTYPES],
    "vector_add": [vector_add(n, dtype) for n in VECTOR_ADD for dtype in DTYPES],
    "attention": drawn_attentions(DRAWN),
    "moe_gemm": drawn_moe_gemms(DRAWN),
}
LARGE = {
    "gemm": [gemm(65_537, 32_768, 8, "bf16")],
    "softmax": [softmax(32_769, 65_536, "bf16")],
    "vector_add": [vector_add(2**31 - 1, "bf16")],
    "attention": [
        attention(17, 64, 8, 1, 131_072, 128, "bf16"),
        attention(1, 129, 3, 131_072, 131_072, 128, "bf16", causal=True, window=64),
    ],
    "moe_gemm": [moe_gemm(64, 70, 2, 8192, 4096, "bf16"), moe_gemm(16_386, 4, 4, 32_768, 64, "bf16", gather=True)],
}
"""More than 2^31 elements in one tensor (one less for vector_add, whose dim ends there): a 32-bit index overflows."""
COMPARED = {
    "attention": [
        attention(2, 8, 8, 1024, 1024, 128, "bf16"),
        attention(2, 8, 2, 1024, 1024, 64, "fp16", causal=True),
        attention(1, 8, 2, 777, 1500, 128, "bf16", causal=True, window=200),
        attention(8, 32, 4, 1, 8192, 128, "bf16"),
    ],
    "moe_gemm": [moe_gemm(512, 16, 2, 512, 2048, "bf16"), moe_gemm(40, 64, 4, 512, 1024, "fp16", "zipf", gather=True)],
}
"""Where a kernel's error is compared with the library's."""


@dataclass(frozen=True)
class Case:
    """One drawn configuration of a kernel at a workload."""

    problem: str
    backend: str
    kernel: Ref
    workload: Workload
    sample: int

    def __str__(self) -> str:
        """Name it as pytest shows it."""
        return f"{self.problem}.{self.backend} {self.workload.shape_text} {self.workload.dtype} #{self.sample}"


CASES = [
    Case(problem, backend, ref, workload, sample)
    for (problem, backend), ref in kernel_refs().items()
    if backend_modules()[backend].device_kind == "cuda"
    for workload in (*WORKLOADS[problem], *LARGE[problem])
    for sample in range(1 if workload in LARGE[problem] or problem in COMPARED else SAMPLES.get(backend, DEFAULT_SAMPLES))
]
AGAINST_THE_LIBRARY = [
    Case(problem, backend, ref, workload, 0)
    for (problem, backend), ref in kernel_refs().items()
    if backend_modules()[backend].device_kind == "cuda"
    for workload in COMPARED.get(problem, ())
]

Queued = tuple[str, Config]


@pytest.fixture(scope="session")
def queued(request: pytest.FixtureRequest) -> dict[str, Queued | str]:
    """Draw a configuration for every selected case and queue its build; a text where there is nothing to build."""
    builds: dict[str, Queued | str] = {}
    for case in (item.callspec.params["case"] for item in request.session.items if "case" in getattr(item, "fixturenames", ())):
        found = backend_modules()[case.backend].probe(DEVICES[0])
        if not found.usable:
            builds[str(case)] = f"{case.backend}: {found.reason}; {found.remedy}"
            continue
        try:
            space = resolve(case.kernel).space(case.workload, DEVICES[0])
        except Unsupported as reason:
            builds[str(case)] = str(reason)
            continue
        config = draw(space, random.Random(str(case)))
        builds[str(case)] = shared_lab().submit(case.kernel, case.workload, config, DEVICES[0].arch), config
    return builds


def built(case: Case, queued: dict[str, Queued | str]) -> Queued:
    """Wait for a case's build; skip where the kernel has no such variant."""
    build = queued[str(case)]
    if isinstance(build, str):
        pytest.skip(build)
    key, config = build
    done = shared_lab().built(key)
    if done.status is not Status.OK:
        pytest.fail(f"{done.status} {dict(config)}: {' '.join(done.message.split())[:400]}", pytrace=False)
    return build


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_right(case: Case, queued: dict[str, Queued | str]) -> None:
    key, config = built(case, queued)
    problem = Ref(module=problem_modules()[case.problem].__name__)
    try:
        wrong = shared_lab().verify(problem, case.workload, DEVICES[0], case.kernel, key)
    except Unavailable as error:
        wrong = f"the workload could not be prepared: {error}"
    if wrong:
        pytest.fail(f"{dict(config)}: {wrong}", pytrace=False)


@pytest.mark.parametrize("case", AGAINST_THE_LIBRARY, ids=str)
def test_error_is_at_most_twice_the_librarys(case: Case, queued: dict[str, Queued | str]) -> None:
    key, config = built(case, queued)
    problem = Ref(module=problem_modules()[case.problem].__name__)
    kernel, library = shared_lab().errors(problem, case.workload, DEVICES[0], case.kernel, key)
    assert kernel.relative <= 2 * library.relative, f"{dict(config)}: {kernel.relative:.3g} of the norm, the library {library.relative:.3g}"
