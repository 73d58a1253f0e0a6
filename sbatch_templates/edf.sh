#---
# about: runs the agents in an environment of the CSCS container engine (srun --environment); its image needs no orch
# args:
#   environment: {help: "name of an EDF in ~/.edf or EDF_PATH without .toml, or the absolute path of its .toml file", pattern: "(?![^/]*\\.toml$)[^/\"\\\\$.][^/\"\\\\$]*|[/~][^\"\\\\$]+", kind: path}
#   mounts: {help: "further mounts, SRC:DST[:FLAGS] separated by commas; + separates flags (ro+private), sqsh mounts a squashfs file", kind: path, default: "", pattern: "[^\"\\\\]+"}
# srun:
#   - "--environment={{ submission }}/environment.toml"
# python: "{{ python }}"
# orch: mounted
#---
printf '%s\n' 'base_environment = "'{{ environment }}'"' 'mounts = [' \
  {% for item in (run_dir ~ ':' ~ run_dir ~ ',' ~ agent ~ ':' ~ agent ~ ':ro' ~ (',' ~ mounts if mounts else '')).split(',') -%}
  '  "'{{ item }}'",' {% endfor -%}
  ']' >{{ submission }}/environment.toml || exit 1
