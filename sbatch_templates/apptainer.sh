#---
# about: runs the agents in an Apptainer (Singularity) image; orch must be installed in it
# args:
#   image: {help: "path of the .sif file, or an URI", kind: path}
#   binds: {help: "further folders, SRC[:DST] separated by commas; the run directory is always there", default: ""}
# python: "apptainer exec{% if gpus != '0' %} --nv{% endif %} --bind {{ run_dir }}{% if binds %} --bind {{ binds }}{% endif %} {{ image }} {{ python }}"
#---
