"""What every kernel keeps: inherit `KernelContract` in your tests, name your kernel and some workloads, and run pytest."""

import random
from types import ModuleType
from typing import ClassVar

import pytest

from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Space
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.core import canonical
from kerneldyno.errors import Unsupported
from kerneldyno.registry import Ref
from kerneldyno.registry import resolve
from kerneldyno.testing.devices import H200
from kerneldyno.testing.lab import here
from kerneldyno.testing.lab import ref_of
from kerneldyno.testing.lab import shared_lab


MOST_CHECKED = 500
"""Configurations of a space that are checked one by one, evenly spread."""

MOST_REGISTERS = 255
"""Registers a thread. Source: CUDA C++ Programming Guide, table of compute capabilities, all since 3.5."""


class KernelContract:
    """Checks a kernel: its space, then a few configurations built in a process without a GPU, and run where the device is.

    Attributes:
        kernel: The kernel: a module, or where it is.
        problem: Its problem: a module, or where it is.
        backend: Its backend, a module; the tests are skipped, with the reason, where it is not usable.
        device: The device to build for.
        workloads: Small workloads, odd sizes among them; those the kernel refuses with `Unsupported` are skipped.
        samples: Configurations that are built for each workload, drawn at random.
        seed: Seed of the drawing.
    """

    kernel: ClassVar[ModuleType | Ref]
    problem: ClassVar[ModuleType | Ref]
    backend: ClassVar[ModuleType]
    device: ClassVar[Device] = H200
    workloads: ClassVar[tuple[Workload, ...]]
    samples: ClassVar[int] = 1
    seed: ClassVar[int] = 0

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test that takes `workload` once for each of them, and one that takes `sample` once for each configuration."""
        if "workload" in metafunc.fixturenames:
            metafunc.parametrize("workload", self.workloads, ids=lambda workload: f"{workload.shape_text} {workload.dtype}")
        if "sample" in metafunc.fixturenames:
            metafunc.parametrize("sample", range(self.samples))

    @pytest.fixture(autouse=True)
    def _usable(self) -> None:
        found = self.backend.probe(self.device)
        if not found.usable:
            pytest.skip(f"{self.backend.name}: {found.reason}; {found.remedy}")

    def space(self, workload: Workload) -> Space:
        """Return the kernel's space, and skip the test where it has no variant for the workload."""
        try:
            return resolve(ref_of(self.kernel)).space(workload, self.device)
        except Unsupported as reason:
            pytest.skip(f"{self.backend.name}: {reason}")

    def config(self, workload: Workload, sample: int) -> Config:
        """Draw a configuration, the same one for the same seed, workload and number."""
        return self.space(workload).sample(random.Random(f"{self.seed} {workload.key} {sample}"))

    def test_it_supports_a_workload(self) -> None:
        """Not every workload is refused, else nothing below would run; and a refusal says why."""
        kernel = resolve(ref_of(self.kernel))
        refusals: list[str] = []
        for workload in self.workloads:
            try:
                kernel.space(workload, self.device)
            except Unsupported as reason:
                refusals.append(str(reason))
        assert len(refusals) < len(self.workloads), refusals
        assert all(reason.strip() for reason in refusals), "Unsupported without a reason"

    def test_the_space_is_sound(self, workload: Workload) -> None:
        """It is not empty, every knob says what it does, every rule its reason, and what it enumerates is valid."""
        space = self.space(workload)
        assert space.size > 0
        for param in space.params.values():
            assert param.doc.strip(), f"{param.name} does not say what it does"
        for constraint in space.constraints:
            assert constraint.reason.strip(), "a constraint has no reason"
        for config in space.configs[:: max(1, space.size // MOST_CHECKED)]:
            assert not space.problems(config), f"{config} is enumerated, but {space.problems(config)}"

    def test_it_builds_within_the_device(self, workload: Workload, sample: int) -> None:
        """A configuration that the constraints admit compiles, and what it needs fits on the device."""
        config = self.config(workload, sample)
        lab = shared_lab()
        key = lab.submit(ref_of(self.kernel), workload, config, self.device.arch)
        built = lab.built(key)
        assert built.status is Status.OK, f"{config}: {built.message}"
        artifact = lab.artifact(key)
        assert dict(artifact.config) == dict(config)
        assert artifact.arch == self.device.arch
        assert artifact.source.strip(), "no source text"
        assert artifact.entry.strip(), "no entry point"
        canonical(artifact.payload)  # JSON values only
        if artifact.threads is not None:
            assert artifact.threads <= self.device.max_threads_per_block, f"{config}: {artifact.threads} threads"
        if self.device.kind == "cuda":
            assert (artifact.registers or 0) <= MOST_REGISTERS, f"{config}: {artifact.registers} registers"
            assert (artifact.smem_bytes or 0) <= self.device.smem_per_block_bytes, f"{config}: {artifact.smem_bytes} bytes"

    def test_it_runs_right(self, workload: Workload, sample: int) -> None:
        """Twice on poisoned outputs it is within the budget, keeps its inputs, and writes nowhere else."""
        device = here(self.device)
        if device is None:
            pytest.skip(f"there is no {self.device.arch} device here; the build alone was checked")
        config = self.config(workload, sample)
        lab = shared_lab()
        key = lab.submit(ref_of(self.kernel), workload, config, self.device.arch)
        assert lab.built(key).status is Status.OK, f"{config}: {lab.built(key).message}"
        wrong = lab.verify(ref_of(self.problem), workload, device, ref_of(self.kernel), key)
        if wrong:
            pytest.fail(f"{workload.shape_text} {workload.dtype} {dict(config)}: {wrong}", pytrace=False)
