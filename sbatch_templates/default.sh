#---
# about: what every job gets - private files, and as many open files as the site allows
#---
umask 077
ulimit -S -n "$(ulimit -H -n)"
