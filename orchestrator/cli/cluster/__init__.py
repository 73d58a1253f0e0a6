"""Verbs about the machine and the cluster: doctor, nodes, controller."""
