"""Verbs for checkpoints: `orch ckpt ls`, `verify`, `diff`, `export`, `import`, `pin`, `du`, `gc`."""
