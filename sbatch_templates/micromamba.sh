#---
# about: activates an environment of micromamba (or mamba) and starts its Python
# args:
#   env: {help: "name or path of the environment", kind: path}
#   root: {help: "root prefix, with the folder envs (micromamba info)", default: ~/micromamba, kind: path}
#   micromamba: {help: "the micromamba program", default: ~/.local/bin/micromamba, kind: path}
# python: "{{ python }}"
#---
export MAMBA_ROOT_PREFIX={{ root }} MAMBA_EXE={{ micromamba }}
activation=$({{ micromamba }} shell hook --shell bash) || exit 1
eval "$activation" || exit 1
micromamba activate {{ env }} || exit 1
