"""Command-line input and output: command classes with the global options, tables, JSON, progress."""
