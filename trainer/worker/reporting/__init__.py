"""What a rank reports while it runs: progress ticks, its own work, metric lines, flight records, stderr."""
