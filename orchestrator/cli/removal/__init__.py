"""`orch rm`: the files of a run, the checks before its removal, and the removal."""
