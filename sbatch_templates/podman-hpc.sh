#---
# about: runs the agents in a podman-hpc container; the image needs no orch
# args:
#   image: {help: "an image that `podman-hpc pull` or `podman-hpc migrate` has made available on the nodes"}
#   volumes: {help: "further mounts, SRC:DST[:ro] separated by commas", kind: path, default: ""}
#   modules: {help: "flags of podman-hpc modules besides gpu, separated by spaces: nccl scratch; none that share a container (mpi)", kind: words, default: "", pattern: "(?!(.*\\s)?(mpi|cuda-mpi|openmpi-pmi2)(\\s|$)).*"}
#   env: {help: "variables inside the image: NAME=VALUE[,NAME=VALUE...]", default: ""}
#   program: {help: "podman-hpc or podman, or its path", kind: path, default: podman-hpc}
# python: >-
#   {{ program }} run --rm --network=host --ipc=host --pid=host
#   --env 'SLURM_*' --env 'SUBMITIT_*' --env 'ORCH_*' --env CUDA_VISIBLE_DEVICES
#   --volume {{ run_dir }}:{{ run_dir }} --volume {{ agent }}:{{ agent }}:ro
#   {%- for item in volumes.split(',') if item %} --volume {{ item }}{% endfor %}
#   {%- for item in env.split(',') if item %} --env {{ item }}{% endfor %}
#   {%- if gpus != '0' %}{% if program.split('/')[-1] == 'podman' %} --device nvidia.com/gpu=all{% else %} --gpu{% endif %}{% endif %}
#   {%- for item in modules %} --{{ item }}{% endfor %} {{ image }} {{ python }}
# orch: mounted
#---
