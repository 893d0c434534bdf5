"""C = A B for the backend plainc: three loops, blocked over k."""

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported
from kerneldyno_scale import plainc


def space(workload: Workload, device: Device) -> Space:
    """The depth of a block."""
    if workload.dtype != "fp32" or workload.shape["layout"] != "nt":
        raise Unsupported("gemm.plainc computes fp32 with layout=nt only")
    return Space([Param("block_k", (64, 256, 1024), "elements of k that are summed at a time")])


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration."""
    source = f"""
#include <stdint.h>
void gemm(const float *a, const float *b, float *c, int64_t m, int64_t n, int64_t k) {{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {{
            float total = 0;
            for (int64_t start = 0; start < k; start += {config["block_k"]}) {{
                int64_t end = start + {config["block_k"]} < k ? start + {config["block_k"]} : k;
                float part = 0;
                for (int64_t p = start; p < end; p++) part += a[i * k + p] * b[j * k + p];
                total += part;
            }}
            c[i * n + j] = total;
        }}
}}
"""
    return plainc.build(source, "gemm", config, arch)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made."""
    m, n, k = (int(workload.shape[key]) for key in "mnk")
    return plainc.Launch(artifact, lambda inputs, outputs: (inputs["a"], inputs["b"], outputs["c"], m, n, k))
