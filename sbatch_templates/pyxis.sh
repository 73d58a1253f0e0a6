#---
# about: runs the agents in a container through the pyxis plugin (srun --container-image); the image needs no orch
# args:
#   image: {help: "an image that enroot can import (nvcr.io#nvidia/pytorch:26.01-py3), or the path of a .sqsh file", kind: path}
#   mounts: {help: "further mounts, SRC:DST[:FLAGS] separated by commas; + separates flags (ro+rprivate)", kind: path, default: ""}
#   workdir: {help: "working directory of the container", default: ""}
#   name: {help: "NAME keeps the container on the node; NAME:create, NAME:exec, NAME:no_exec or NAME:auto", default: "", pattern: "[^:,/\\s]+(:(auto|create|exec|no_exec))?"}
#   save: {help: "a .sqsh file in which each node saves its container at the end", kind: path, default: "", pattern: ".*[^/]"}
#   env: {help: "variables whose values in the image give way to the job's: NAME[,NAME...]", default: "", pattern: "\\w+(,\\w+)*"}
#   mount_home: {help: "true or false; empty: the site's default", default: "false", pattern: "true|false|"}
#   remap_root: {help: "true or false: root inside the container; empty: the site's default", default: "", pattern: "true|false"}
#   writable: {help: "true or false; empty: the site's default", default: "", pattern: "true|false"}
#   entrypoint: {help: "true or false: run the image's entrypoint first; empty: the site's default", default: "", pattern: "true|false"}
#   unshare: {help: "new namespaces: ipc, uts or ipc,uts (pyxis 0.24); net would cut the ranks off from each other", default: "", pattern: "(ipc|uts)(,(ipc|uts))*"}
# srun:
#   - "--container-image={{ image }}"
#   - "--container-mounts={{ run_dir }}:{{ run_dir }},{{ agent }}:{{ agent }}:ro{% if mounts %},{{ mounts }}{% endif %}"
#   - "{% if workdir %}--container-workdir={{ workdir }}{% endif %}"
#   - "{% if name %}--container-name={{ name }}{% endif %}"
#   - "{% if save %}--container-save={{ save }}{% endif %}"
#   - "{% if env %}--container-env={{ env }}{% endif %}"
#   - "{% if mount_home == 'true' %}--container-mount-home{% elif mount_home %}--no-container-mount-home{% endif %}"
#   - "{% if remap_root == 'true' %}--container-remap-root{% elif remap_root %}--no-container-remap-root{% endif %}"
#   - "{% if writable == 'true' %}--container-writable{% elif writable %}--container-readonly{% endif %}"
#   - "{% if entrypoint == 'true' %}--container-entrypoint{% elif entrypoint %}--no-container-entrypoint{% endif %}"
#   - "{% if unshare %}--container-unshare={{ unshare }}{% endif %}"
# python: "{{ python }}"
# orch: mounted
#---
