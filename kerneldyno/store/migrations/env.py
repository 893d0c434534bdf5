"""Runs the migrations on the connection that `engine` hands over; touches neither logging nor any file."""

from alembic import context

from kerneldyno.store.engine import VERSION_TABLE
from kerneldyno.store.models import Base


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
# the caller's transaction holds it all: the tables appear whole or not at all
with context.begin_transaction():
    context.run_migrations()
