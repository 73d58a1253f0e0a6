"""Fork server (a process with torch and the workload imported that forks ranks) and the start of ranks."""
