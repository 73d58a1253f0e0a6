#!/bin/sh -e
# enter_image.sh ROOT FOLDER[:ro]... -- COMMAND: runs a command in a root folder that has these folders of the host
root=$1; shift
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/tmp"
while [ "$1" != -- ]; do
    folder=${1%:ro}
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
    [ "$folder" = "$1" ] || mount -o remount,ro,bind "$root$folder"
    shift
done
shift
exec chroot "$root" "$@"
