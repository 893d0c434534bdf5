"""Building, running and judging a C kernel in the test's own process; one library serves every shape of its dtype and layout."""

import functools
import json
import os
import time
from collections.abc import Callable
from types import ModuleType

import torch

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.core import canonical
from kerneldyno.core.error import error_between


CORES = len(os.sched_getaffinity(0))
CPU = Device("cpu", "this machine", os.uname().machine, sm_count=CORES, max_threads_per_block=CORES)


@functools.cache
def _built(kernel: ModuleType, dtype: str, layout: str, config: str) -> Artifact:
    return kernel.build(Workload(kernel.__name__.rpartition(".")[2], {"layout": layout}, dtype), json.loads(config), CPU.arch)


def built(kernel: ModuleType, workload: Workload, config: Config) -> Artifact:
    return _built(kernel, workload.dtype, str(workload.shape.get("layout", "")), canonical(config))


def answer(kernel: ModuleType, problem: ModuleType, workload: Workload, config: Config, inputs: Tensors | None = None) -> Tensors:
    """Run once into outputs full of NaN."""
    inputs = problem.inputs(workload, "cpu") if inputs is None else inputs
    outputs = problem.outputs(workload, "cpu")
    for tensor in outputs.values():
        tensor.fill_(float("nan"))
    launch = kernel.load(built(kernel, workload, config), workload)
    launch.prepare(inputs, outputs)
    launch.run()
    return outputs


def check(kernel: ModuleType, problem: ModuleType, workload: Workload, config: Config) -> None:
    inputs = problem.inputs(workload, "cpu")
    reference = problem.reference(workload, inputs)
    error = error_between(answer(kernel, problem, workload, config, inputs), reference)
    budget = problem.tolerance(workload, inputs, reference)
    assert budget.admits(error), f"{workload.key} {config}: {error}, allowed {budget}"


def check_again(kernel: ModuleType, problem: ModuleType, workload: Workload, config: Config) -> None:
    """Run twice into the same outputs: nothing of the first run may reach the second."""
    inputs, outputs = problem.inputs(workload, "cpu"), problem.outputs(workload, "cpu")
    launch = kernel.load(built(kernel, workload, config), workload)
    launch.prepare(inputs, outputs)
    launch.run()
    first = {name: tensor.clone() for name, tensor in outputs.items()}
    launch.run()
    for name, tensor in outputs.items():
        assert torch.equal(first[name], tensor)


def ratio_to(theirs: Callable[[], object], ours: Callable[[], object], enough: float, rounds: int = 60) -> float:
    """Time both in turn and return our least time over theirs; stops once it is `enough`, as a busy machine needs more rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(CORES)
    least = [float("inf"), float("inf")]
    try:
        for turn in range(rounds):
            for index, run in enumerate((theirs, ours)):
                started = time.perf_counter()
                run()
                least[index] = min(least[index], time.perf_counter() - started)
            if turn >= 4 and least[1] <= enough * least[0]:
                break
    finally:
        torch.set_num_threads(threads)
    return least[1] / least[0]
