"""`orch restore-tests` and `orch ckpt restore-test`."""
