"""Run by Alembic for each command; the connection comes from `migrate`."""

from alembic import context

from sessions.tables import metadata

# Batch mode copies a table where SQLite cannot alter it.
context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
