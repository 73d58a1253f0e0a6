"""Files of lines: logs, and who may append."""
