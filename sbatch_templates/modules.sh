#---
# about: loads environment modules (Lmod or Tcl) before Python starts
# args:
#   modules: {help: "names of the modules, in order, separated by spaces (cuda/12.8 nccl)", default: "", kind: words}
#   collection: {help: "saved set of modules to restore first (module save NAME)", default: ""}
#   init: {help: "file that defines the module command where the login shell does not", default: /etc/profile.d/modules.sh, kind: path}
#---
type module >/dev/null 2>&1 || . {{ init }} || exit 1
{% if collection %}
module restore {{ collection }} || exit 1
{% endif %}
{% if modules %}
module load {{ modules }} || exit 1
{% endif %}
