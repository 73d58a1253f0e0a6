#---
# about: runs the agents in a Shifter image; the image needs no orch
# args:
#   image: {help: "type and name of an image that the site's gateway has: docker:nvcr.io/nvidia/pytorch:26.01-py3"}
#   volumes: {help: "further mounts, SRC:DST[:ro] separated by commas", kind: path, default: ""}
#   modules: {help: "Shifter modules, separated by commas: gpu,nccl-plugin", default: ""}
#   env: {help: "variables inside the image: NAME=VALUE[,NAME=VALUE...]", default: ""}
# python: >-
#   shifter --image={{ image }} --volume={{ run_dir }}:{{ run_dir }} --volume={{ agent }}:{{ agent }}:ro
#   {%- for item in volumes.split(',') if item %} --volume={{ item }}{% endfor %}
#   {%- if modules %} --module={{ modules }}{% endif %}
#   {%- for item in env.split(',') if item %} --env={{ item }}{% endfor %} {{ python }}
# orch: mounted
#---
