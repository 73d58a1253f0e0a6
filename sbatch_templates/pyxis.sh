#---
# about: runs the agents in a container through the pyxis plugin; orch must be installed in the image
# args:
#   image: {help: "what enroot can import (nvcr.io#nvidia/pytorch:26.01-py3), or a .sqsh file"}
#   mounts: {help: "further folders, SRC:DST separated by commas; the run directory is always there", default: ""}
# srun:
#   - "--container-image={{ image }}"
#   - "--container-mounts={{ run_dir }}:{{ run_dir }}{% if mounts %},{{ mounts }}{% endif %}"
#   - "--no-container-mount-home"
# python: "{{ python }}"
#---
