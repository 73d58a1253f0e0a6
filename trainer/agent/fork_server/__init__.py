"""The fork server, a process that has imported torch and the workload and forks ranks, and what it needs to do so."""
