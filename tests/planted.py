"""A plugin whose kernels go wrong in every way that a real one does: real C, real crashes, real endless loops.

One knob, `fault`, chooses how; `twin` only makes the space larger.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping

from kerneldyno.core import Artifact
from kerneldyno.core import Availability
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported


LOOP = "for (long i = 0; i < n; i++) out[i] = x[i] + y[i];"
BODIES: Mapping[str, str] = {
    "none": LOOP,
    "segfault": "*(volatile float *)8 = 1.0f;",
    "endless": "for (volatile long i = 0; ; i++) if (i < 0) break;",
    "wrong": "for (long i = 0; i < n; i++) out[i] = x[i] - y[i];",
    "one_wrong": LOOP + " out[n / 2] += 1.0f;",
    "unwritten": "for (long i = 0; i + 1 < n; i++) out[i] = x[i] + y[i];",
    "out_of_bounds": LOOP + " out[n] = 0.0f;",
    "changes_input": LOOP + " x[0] += 1.0f;",
    "flaky": "static int calls; " + LOOP + " if (calls++) out[0] += 1.0f;",
    "dies_in_the_race": "static int calls; if (++calls > 100) *(volatile float *)8 = 1.0f; " + LOOP,
    "keeps_output": "static float *kept; static int calls; if (!calls++) {" + LOOP + "}",
    "syntax": "this is not C;",
    "build_hangs": LOOP,
    "build_dies": LOOP,
    "launch_error": LOOP,
    "out_of_resources": LOOP,
    "no_memory_later": LOOP,
}


class Backend:
    """Always usable."""

    name = "planted"
    device_kind = "cpu"

    @staticmethod
    def probe(device: Device | None) -> Availability:
        """Usable."""
        return Availability(True, versions={"planted": "1"})


class Launch:
    """Calls the C function."""

    def __init__(self, library: ctypes.CDLL, fault: str) -> None:
        self.library = library
        self.fault = fault
        self.prepared = 0

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the tensors."""
        if self.fault == "launch_error":
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        if self.fault == "out_of_resources":
            raise RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
        self.prepared += 1
        if self.fault == "no_memory_later" and self.prepared > 1:  # a trial prepares once, the playoff again on fresh inputs
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        self.arguments = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (inputs["x"], inputs["y"], outputs["out"])]
        self.arguments.append(ctypes.c_long(outputs["out"].numel()))

    def run(self) -> None:
        """Run it."""
        self.library.add(*self.arguments)

    def layout(self) -> None:
        """Take two milliseconds, which must be told apart from the launch."""
        time.sleep(0.002)


class Kernel:
    """vector_add, with faults."""

    @staticmethod
    def space(workload: Workload, device: Device) -> Space:
        """Every fault, or those that $PLANTED names, twice."""
        if workload.shape["n"] == 13:
            raise Unsupported("13 is unlucky")
        faults = tuple(os.environ.get("PLANTED", "").split()) or tuple(BODIES)
        return Space([Param("fault", faults, "what goes wrong"), Param("twin", (1, 2), "nothing")])

    @staticmethod
    def build(workload: Workload, config: Config, arch: str) -> Artifact:
        """Compile with cc."""
        fault = str(config["fault"])
        if fault == "build_hangs":
            subprocess.run(["sleep", "1000"], check=True)  # as a compiler that never ends: a child process
        if fault == "build_dies":
            os.abort()
        time.sleep(float(os.environ.get("PLANTED_BUILD_S", "0")))
        source = f"void add(float *x, float *y, float *out, long n) {{ {BODIES[fault]} }}"
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "kernel.so")
            done = subprocess.run(
                ["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=source, text=True, capture_output=True, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            with open(path, "rb") as file:
                return Artifact(config=config, arch=arch, source=source, entry="add", binary=file.read())

    @staticmethod
    def load(artifact: Artifact, workload: Workload) -> Launch:
        """Load the shared object."""
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(artifact.binary)
            file.flush()
            return Launch(ctypes.CDLL(file.name), str(artifact.config["fault"]))


BACKENDS = {"planted": Backend}
KERNELS = {"vector_add.planted": Kernel}
