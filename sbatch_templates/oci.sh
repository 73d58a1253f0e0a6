#---
# about: runs the agents in an OCI bundle through Slurm's own --container; the image needs no orch
# args:
#   bundle: {help: "absolute path of the bundle, whose config.json mounts the folder of runs and ORCH_HOME", kind: path, pattern: "/.*"}
# srun:
#   - "--container={{ bundle }}"
# python: "{{ python }}"
# orch: mounted
#---
