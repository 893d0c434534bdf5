"""y = a x for the backend c."""

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload
from kerneldyno_scale import plainc


def space(workload: Workload, device: Device) -> Space:
    """How far the loop is unrolled, and whether the factor is a constant of the source."""
    return Space([Param("unroll", (1, 4, 8), "elements a step"), Param("constant", (False, True), "the factor is written into the source")])


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration."""
    factor = f"{workload.shape['a']}.0f" if config["constant"] else "(float)a"
    source = f"""
#include <stdint.h>
void scale(const float *restrict x, float *restrict y, int64_t n, int64_t a) {{
    #pragma GCC unroll {config["unroll"]}
    for (int64_t i = 0; i < n; i++) y[i] = {factor} * x[i];
}}
"""
    return plainc.build(source, "scale", config, arch)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made."""
    n, a = int(workload.shape["n"]), int(workload.shape["a"])
    return plainc.Launch(artifact, lambda inputs, outputs: (inputs["x"], outputs["y"], n, a))
