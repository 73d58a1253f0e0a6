#---
# about: activates an environment that `pixi install` made, and starts its Python
# args:
#   project: {help: "folder with pixi.toml or pyproject.toml and .pixi, on the shared file system", kind: path}
#   environment: {help: "name of the environment", default: default}
#   pixi: {help: "the pixi program", default: ~/.pixi/bin/pixi, kind: path}
# python: "{{ project }}/.pixi/envs/{{ environment }}/bin/python"
#---
activation=$({{ pixi }} shell-hook --shell bash --frozen --no-install --manifest-path {{ project }} --environment {{ environment }}) || exit 1
eval "$activation" || exit 1
