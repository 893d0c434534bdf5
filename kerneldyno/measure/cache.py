"""The artifact cache: what was compiled once is not compiled again, whoever was killed while writing it."""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Environment
from kerneldyno.core import Workload
from kerneldyno.core import digest


_MAGIC = b"kerneldyno-artifact-1"


def cache_root() -> Path:
    """The folder of compiled things: $KERNELDYNO_CACHE, else `kerneldyno` below $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("KERNELDYNO_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kerneldyno"


def compiler_caches(root: Path) -> dict[str, str]:
    """Environment variables that put the DSLs' own caches below ours, the same in every worker process."""
    return {"TRITON_CACHE_DIR": str(root / "triton"), "TILELANG_CACHE_DIR": str(root / "tilelang")}


def artifact_key(workload: Workload, backend: str, kernel_digest: str, config: Config, arch: str, environment: Environment) -> str:
    """Name an artifact by all that decides its content; the inputs' seed does not."""
    parts = [workload.problem, workload.shape, workload.dtype, backend, kernel_digest, config, arch, environment.versions]
    return digest(parts)


class ArtifactCache:
    """Artifacts on disk, one file each, named by content key.

    A file appears whole or not at all (written aside, then renamed), and carries a checksum: one that a power loss
    tore is found and counts as absent.

    Args:
        root: The folder; made when first written to.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_root()

    def path(self, key: str) -> Path:
        """Where the artifact of a key lies."""
        return self.root / "artifacts" / key[:2] / f"{key}.artifact"

    def get(self, key: str) -> Artifact | None:
        """Read an artifact; None where it is absent or damaged (the damaged file is removed)."""
        path = self.path(key)
        try:
            header, _, body = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        fields = header.split(b" ")
        if len(fields) != 3 or fields[0] != _MAGIC or hashlib.sha256(body).hexdigest().encode() != fields[1]:
            path.unlink(missing_ok=True)
            return None
        split = int(fields[2])
        return Artifact(**json.loads(body[:split]), binary=body[split:])

    def put(self, key: str, artifact: Artifact) -> None:
        """Write an artifact; a second writer of the same key does no harm."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {field.name: getattr(artifact, field.name) for field in dataclasses.fields(artifact) if field.name != "binary"}
        described = json.dumps(fields, default=dict).encode()
        body = described + artifact.binary
        header = b" ".join((_MAGIC, hashlib.sha256(body).hexdigest().encode(), str(len(described)).encode()))
        descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(header + b"\n" + body)
            os.replace(aside, path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
