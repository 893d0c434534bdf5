"""The database: `engine` opens it, `write` is the tuner's alone, `query` is everyone's, `shipped` holds what the package brings."""

from kerneldyno.store.engine import EmptyStore
from kerneldyno.store.engine import open_store
from kerneldyno.store.state import State
from kerneldyno.store.state import state


__all__ = ["EmptyStore", "State", "open_store", "state"]
