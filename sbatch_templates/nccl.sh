#---
# about: NCCL's settings for the cluster's network
# args:
#   nccl_interface: {help: "network interface for NCCL's bootstrap (ib0)", default: ""}
#   nccl_hca: {help: "InfiniBand adapters to use (mlx5_0,mlx5_1)", default: ""}
#   nccl_debug: {help: "VERSION, WARN, INFO or TRACE", default: WARN}
#---
export NCCL_DEBUG={{ nccl_debug }}
{% if nccl_interface %}
export NCCL_SOCKET_IFNAME={{ nccl_interface }}
{% endif %}
{% if nccl_hca %}
export NCCL_IB_HCA={{ nccl_hca }}
{% endif %}
