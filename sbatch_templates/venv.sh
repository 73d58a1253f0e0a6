#---
# about: activates a virtual environment (python -m venv, uv venv) and starts its Python
# args:
#   venv: {help: "folder of the environment, on the shared file system", kind: path}
# python: "{{ venv }}/bin/python"
#---
. {{ venv }}/bin/activate || exit 1
