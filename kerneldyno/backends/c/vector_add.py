"""out = x + y in C: the shortest kernel, to copy for a new one."""

from kerneldyno.backends.c._compile import CLaunch
from kerneldyno.backends.c._compile import build_library
from kerneldyno.backends.c._compile import threads_knob
from kerneldyno.backends.c._compile import vector_knob
from kerneldyno.backends.c._vectors import prelude
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload


SOURCE = """
void vector_add(const element *x, const element *y, element *out, int64_t n) {{
    #pragma omp parallel for num_threads({threads}) schedule({schedule})
    for (int64_t start = 0; start < n; start += {block}) {{
        int64_t i = start, end = n - start < {block} ? n : start + {block};
        for (; i + W <= end; i += W) {write}(out + i, load(x + i) + load(y + i));
        if (i < end) store_part(out + i, load_part(x + i, end - i, splat(0)) + load_part(y + i, end - i, splat(0)), end - i);
        fence();
    }}
}}
"""


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: team, vectors and how the elements are dealt out."""
    return Space(
        [
            threads_knob(device),
            Param("schedule", ("static", "dynamic"), "how OpenMP deals out the blocks", when=lambda threads: threads > 1),
            Param("block", (1024, 4096, 16384, 65536), "elements that a thread takes at a time"),
            vector_knob(device.arch),
            Param("write", ("store", "stream"), "through the caches, or past them"),
        ]
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration."""
    source = prelude(int(config["vector_bytes"]), workload.dtype) + SOURCE.format(**{"schedule": "static", **config})
    return build_library(source, "vector_add", config, arch, int(config["threads"]))


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made."""
    return CLaunch(artifact, lambda inputs, outputs: (inputs["x"], inputs["y"], outputs["out"], inputs["x"].numel()))
