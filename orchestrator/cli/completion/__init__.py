"""Shell completion: the scripts, and the candidates that `orch` returns for them."""
