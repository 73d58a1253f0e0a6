"""Where a `command:` runs."""

FOLDER_VARIABLE = "ORCH_SUBMIT_DIR"
"""Entry of `env` that names the folder in which the command runs; without it, that of the submit."""
