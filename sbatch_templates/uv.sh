#---
# about: activates the environment that `uv sync` made for a project, and starts its Python
# args:
#   project: {help: "folder with pyproject.toml and .venv, on the shared file system", kind: path}
# python: "{{ project }}/.venv/bin/python"
#---
. {{ project }}/.venv/bin/activate || exit 1
