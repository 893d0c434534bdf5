"""The time of a kernel's layout, beside its own."""

import sqlalchemy as sa
from alembic import op


revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column; what was measured before has none."""
    op.add_column("playoff_entry", sa.Column("layout_us", sa.Double(), nullable=True))
