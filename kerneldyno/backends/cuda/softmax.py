"""Softmax over rows: a row is shared by a part of a warp, a block, or a cluster of blocks, and held in registers.

Rows too long for that, and any other, can be read twice instead ("online").
"""

from kerneldyno.backends.cuda._compile import compile_kernel
from kerneldyno.backends.cuda._compile import source_text
from kerneldyno.backends.cuda._launch import CudaLaunch
from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload


_PACKET_BYTES = 16
_MAX_DATA_REGISTERS = 128  # a longer unrolled row only makes the code longer: more threads do the same


_STARTS = (
    {"method": "registers", "threads": 1024, "row_threads": 512, "hold": "exp", "load": "cached"},
    {"method": "registers", "threads": 256, "row_threads": 256, "hold": "exp", "resident": 1536, "load": "cached"},
    {"method": "registers", "threads": 256, "row_threads": 256, "cluster": 8, "hold": "exp", "load": "cached"},
    {"method": "registers", "threads": 512, "row_threads": 512, "cluster": 8, "hold": "raw"},
)
"""Best of earlier searches at 16384 x 8192, 4096 x 4096 and 8192 x 131072, bf16, H200 (docs/notes/softmax.md)."""


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: how many threads share a row, how it is held, cache hints."""
    rows, columns = int(workload.shape["m"]), int(workload.shape["n"])
    packets = _row_packets(columns, workload.dtype)
    wide = max(8, 1 << (packets - 1).bit_length())
    threads_limit, registers_limit = device.max_threads_per_block, device.registers_per_sm
    elements = _PACKET_BYTES // DTYPE_BYTES[workload.dtype]

    def held(row_threads: int, cluster: int) -> int:
        return -(-packets // (row_threads * cluster))

    def fits(threads: int, row_threads: int, cluster: int, hold: str, resident: int) -> bool:
        data = held(row_threads, cluster) * (elements if hold == "exp" else 4)
        # what compiled kernels need not to spill: numbers being unpacked add three quarters to a row held as it was read
        needed = data + 24 if hold == "exp" else data * 7 // 4 + 12
        return data <= _MAX_DATA_REGISTERS and needed * max(threads, resident) <= registers_limit

    return Space(
        [
            Param("method", ("registers", "online"), "hold the row in registers, or read it twice"),
            Param("threads", (32, 64, 128, 256, 512, 1024), "threads a block"),
            Param("row_threads", tuple(1 << bits for bits in range(3, 11)), "threads of a block that share a row"),
            Param("cluster", (1, 2, 4, 8), "blocks that share a row and combine through each other's shared memory", _held),
            Param("hold", ("raw", "exp"), "what stays in registers: the row as read, or its exponentials in fp32", _held),
            Param("resident", (0, 1024, 1536, 2048), "threads that a multiprocessor has registers for; 0: the compiler's choice", _held),
            Param("unroll", (1, 2, 4, 8), "packets of 16 bytes a thread reads at a time", lambda method: method == "online"),
            Param("load", ("stream", "cached", "prefetch"), "no place in L1, plain, or 256 bytes at a time into L2"),
            Param("store", ("stream", "cached"), "first out of L2, or plain"),
        ],
        [
            Constraint(lambda threads: threads <= threads_limit, f"a block has at most {threads_limit} threads"),
            Constraint(lambda threads, row_threads: row_threads <= threads, "the threads that share a row are at most the block's"),
            Constraint(
                lambda row_threads: row_threads <= wide,
                f"a row has {packets} packets of 16 bytes: more than {wide} threads would idle",
            ),
            Constraint(
                lambda row_threads, cluster: cluster == 1 or row_threads * cluster <= wide,
                f"a row has {packets} packets of 16 bytes: more than {wide} threads in all blocks of a cluster would idle",
            ),
            Constraint(
                lambda threads, row_threads, cluster: cluster == 1 or (row_threads == threads and threads >= 32),
                "blocks of a cluster each give all their threads, a whole warp (32) at least, to one row",
            ),
            Constraint(
                lambda threads, resident: resident == 0 or resident % threads == 0,
                "the resident threads are whole blocks",
            ),
            Constraint(lambda cluster: rows * cluster < 2**31, "a launch has at most 2^31 - 1 blocks"),
            Constraint(
                fits,
                f"a thread's part of the row takes at most {_MAX_DATA_REGISTERS} registers, and all resident threads, temporaries "
                f"counted, at most {registers_limit}",
            ),
            Constraint(
                lambda row_threads, hold: elements != 4 or hold == "exp",
                "fp32 exponentials take no more registers than the row: they are always what is held",
            ),
        ],
        _STARTS,
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; touches no GPU."""
    rows, columns = int(workload.shape["m"]), int(workload.shape["n"])
    threads, row_threads, cluster = int(config["threads"]), int(config["row_threads"]), int(config.get("cluster", 1))
    online = config["method"] == "online"
    packets = int(config["unroll"]) if online else -(-_row_packets(columns, workload.dtype) // (row_threads * cluster))
    text = source_text(
        "softmax",
        workload.dtype,
        {
            "ROWS": rows,
            "COLUMNS": columns,
            "THREADS": threads,
            "ROW_THREADS": row_threads,
            "CLUSTER": cluster,
            "PACKETS": packets,
            "ONLINE": online,
            "HOLD_EXP": config.get("hold") == "exp",
            "BLOCKS_PER_SM": max(1, int(config.get("resident", 0)) // threads),
        },
        {
            "LOAD": f"Load::{config['load']}",
            "STORE": f"Store::{config['store']}",
            "CLUSTER_DIMS": f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else "",
        },
    )
    blocks = cluster * -(-rows // (threads // row_threads))
    # one (maximum, sum) of 8 bytes for every warp that shares a row
    smem_bytes = threads // 32 * cluster * 8 if row_threads * cluster > 32 else 0
    return compile_kernel(text, "softmax", config, arch, blocks=blocks, threads=threads, smem_bytes=smem_bytes, tensors=("x", "y"))


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load the machine code, in the process that owns the GPU."""
    return CudaLaunch(artifact)


def _held(method: str) -> bool:
    return method == "registers"


def _row_packets(columns: int, dtype: str) -> int:
    """Return how many 16-byte packets, counted from the start of the tensor, one row touches at most."""
    elements = _PACKET_BYTES // DTYPE_BYTES[dtype]
    return columns // elements if columns % elements == 0 else (columns + 2 * elements - 2) // elements
