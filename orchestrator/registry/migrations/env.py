"""Run by alembic: applies the migrations on the connection, and in the transaction, that `migrate` hands over."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    render_as_batch=True,  # SQLite changes a table by making a new one
    transactional_ddl=True,
)
context.run_migrations()
