#---
# about: activates a conda environment and starts its Python
# args:
#   env: {help: "name or path of the environment", kind: path}
#   base: {help: "folder of the conda installation (conda info --base)", kind: path}
# python: "{{ python }}"
#---
. {{ base }}/etc/profile.d/conda.sh || exit 1
conda activate {{ env }} || exit 1
