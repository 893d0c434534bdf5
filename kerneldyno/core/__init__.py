"""The records and protocols that every part of Kerneldyno speaks; imports nothing else of the package."""

from kerneldyno.core.protocols import Backend
from kerneldyno.core.protocols import Kernel
from kerneldyno.core.protocols import Launch
from kerneldyno.core.protocols import Problem
from kerneldyno.core.protocols import Tensors
from kerneldyno.core.records import DTYPE_BYTES
from kerneldyno.core.records import DTYPE_EPSILON
from kerneldyno.core.records import SOLVING_ROLES
from kerneldyno.core.records import Artifact
from kerneldyno.core.records import Availability
from kerneldyno.core.records import Baseline
from kerneldyno.core.records import Config
from kerneldyno.core.records import Device
from kerneldyno.core.records import Dim
from kerneldyno.core.records import Environment
from kerneldyno.core.records import Error
from kerneldyno.core.records import ErrorBudget
from kerneldyno.core.records import Outcome
from kerneldyno.core.records import Shape
from kerneldyno.core.records import Status
from kerneldyno.core.records import Value
from kerneldyno.core.records import Work
from kerneldyno.core.records import Workload
from kerneldyno.core.records import canonical
from kerneldyno.core.records import digest
from kerneldyno.core.space import Constraint
from kerneldyno.core.space import Param
from kerneldyno.core.space import Space


__all__ = [
    "DTYPE_BYTES",
    "DTYPE_EPSILON",
    "SOLVING_ROLES",
    "Artifact",
    "Availability",
    "Backend",
    "Baseline",
    "Config",
    "Constraint",
    "Device",
    "Dim",
    "Environment",
    "Error",
    "ErrorBudget",
    "Kernel",
    "Launch",
    "Outcome",
    "Param",
    "Problem",
    "Shape",
    "Space",
    "Status",
    "Tensors",
    "Value",
    "Work",
    "Workload",
    "canonical",
    "digest",
]
