"""The fork server, a process that has imported torch and the workload and forks ranks, and the start of ranks."""
