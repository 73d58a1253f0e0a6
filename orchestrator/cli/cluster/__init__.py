"""Verbs for the machine and the cluster: doctor, nodes, controller."""
