"""Which registry versions this program knows; kept apart so that reading a version needs no alembic."""

KNOWN = ("0001", "0002", "0003", "0004", "0005")
"""Every revision in `migrations/versions`, oldest first; a test holds this list to the folder."""

HEAD = KNOWN[-1]
