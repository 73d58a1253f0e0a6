"""What is typed and what is printed: command classes with the global options, tables, JSON, progress."""
