#---
# about: runs the agents in an Apptainer or Singularity image; the image needs no orch
# args:
#   image: {help: "path of a .sif file or a sandbox folder, or a URI (docker://...)", kind: path}
#   binds: {help: "further mounts, SRC[:DST[:ro]] separated by commas", kind: path, default: ""}
#   squashfs: {help: "data in squashfs files, FILE.sqsh:DST separated by commas", kind: path, default: "", pattern: "[^:,]+:[^:,]+(,[^:,]+:[^:,]+)*"}
#   gpu: {help: "nv (NVIDIA), nvccli, rocm (AMD) or none; used only with cluster.gpus_per_node", default: nv, pattern: "nv|nvccli|rocm|none"}
#   overlay: {help: "an overlay image or folder, with :ro for read-only", kind: path, default: ""}
#   env: {help: "variables inside the image: NAME=VALUE[,NAME=VALUE...]", default: ""}
#   cleanenv: {help: "true: only the variables of Slurm, orch and the GPUs enter the image", default: "false", pattern: "true|false"}
#   writable_tmpfs: {help: "true: the image's files can be changed, in memory", default: "false", pattern: "true|false"}
#   no_home: {help: "true: the home folder is not mounted", default: "false", pattern: "true|false"}
#   program: {help: "apptainer or singularity, or its path", kind: path, default: apptainer}
# python: >-
#   {% if cleanenv == 'true' %}bash -c 'for name in "${!SLURM@}" "${!SUBMITIT@}" "${!ORCH@}" CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES;
#   do [ -z "${!name+set}" ] || export "APPTAINERENV_$name=${!name}" "SINGULARITYENV_$name=${!name}"; done; exec "$@"' bash{% endif %}
#   {{ program }} exec{% if gpus != '0' and gpu != 'none' %} --{{ gpu }}{% endif %}
#   --bind {{ run_dir }},{{ agent }}:{{ agent }}:ro{% if binds %} --bind {{ binds }}{% endif %}
#   {%- for item in squashfs.split(',') if item %} --bind {{ item }}:image-src=/{% endfor %}
#   {%- if overlay %} --overlay {{ overlay }}{% endif %}{% if env %} --env {{ env }}{% endif %}
#   {%- if cleanenv == 'true' %} --cleanenv{% endif %}{% if writable_tmpfs == 'true' %} --writable-tmpfs{% endif %}
#   {%- if no_home == 'true' %} --no-home{% endif %} {{ image }} {{ python }}
# orch: mounted
#---
