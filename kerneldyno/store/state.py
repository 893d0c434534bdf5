"""What `tune doctor` says of a database."""

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func
from sqlalchemy import select

from kerneldyno.errors import StoreError
from kerneldyno.store.engine import EmptyStore
from kerneldyno.store.engine import open_store
from kerneldyno.store.engine import parse
from kerneldyno.store.models import StudyTable
from kerneldyno.store.models import TrialRow


@dataclass(frozen=True, slots=True)
class State:
    """Whether a database can be used.

    Attributes:
        ok: True where it can be read, or made.
        text: What it holds, or what is wrong.
        remedy: What to do; empty where ok.
    """

    ok: bool
    text: str
    remedy: str = ""


def state(db: str) -> State:
    """Look at a database without changing it.

    Args:
        db: A path or an SQLAlchemy URL.
    """
    try:
        engine = open_store(db, readonly=True)
    except EmptyStore:
        target = parse(db)
        place = f"the first search makes it in {target.parent}" if isinstance(target, Path) else "the first search makes its tables"
        return State(True, f"none yet; {place}")
    except StoreError as error:
        return State(False, str(error), "choose another with db=FILE or db=URL")
    try:
        with engine.connect() as connection:
            studies = connection.execute(select(func.count()).select_from(StudyTable)).scalar_one()
            trials = connection.execute(select(func.count()).select_from(TrialRow)).scalar_one()
    except StoreError as error:
        return State(False, str(error), "choose another with db=FILE or db=URL")
    finally:
        engine.dispose()
    return State(True, f"{studies} studies, {trials} trials")
