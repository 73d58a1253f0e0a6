"""The fork server: a process with torch and the workload imported that forks ranks, and how ranks are started."""
