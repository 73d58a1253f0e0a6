#---
# about: loads environment modules (Lmod or Tcl) before Python starts
# args:
#   modules: {help: "names of the modules, in order, separated by spaces (cuda/12.8 nccl)", kind: words}
#   init: {help: "file that defines the module command where the login shell does not", default: /etc/profile.d/modules.sh, kind: path}
#---
type module >/dev/null 2>&1 || . {{ init }} || exit 1
module load {{ modules }} || exit 1
