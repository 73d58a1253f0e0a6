#---
# about: runs the agents in a podman-hpc container; the image needs no orch
# args:
#   image: {help: "an image that `podman-hpc pull` or `podman-hpc migrate` has made available on the nodes"}
#   volumes: {help: "further mounts, SRC:DST[:ro] separated by commas", default: ""}
#   modules: {help: "podman-hpc modules of the site besides gpu, separated by spaces: nccl mpich", kind: words, default: ""}
#   env: {help: "variables inside the image: NAME=VALUE[,NAME=VALUE...]", default: ""}
#   program: {help: "podman-hpc or podman, or its path", default: podman-hpc}
# python: >-
#   {{ program }} run --rm --network=host --ipc=host --pid=host
#   --env 'SLURM_*' --env 'SUBMITIT_*' --env 'ORCH_*' --env CUDA_VISIBLE_DEVICES
#   --volume {{ run_dir }}:{{ run_dir }} --volume {{ agent }}:{{ agent }}:ro
#   {%- for item in volumes.split(',') if item %} --volume {{ item }}{% endfor %}
#   {%- for item in env.split(',') if item %} --env {{ item }}{% endfor %}
#   {%- if gpus != '0' %} --gpu{% endif %}{% for item in modules %} --{{ item }}{% endfor %} {{ image }} {{ python }}
# orch: mounted
#---
