"""Alembic's entry point: runs the migrations on the connection, and in the transaction, passed by `migrate`."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    render_as_batch=True,  # SQLite changes a table by creating a new one
    transactional_ddl=True,
)
context.run_migrations()
