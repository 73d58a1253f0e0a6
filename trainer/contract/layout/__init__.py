"""How the ranks share a model, a batch and a sequence: what does not fit, and which sizes would."""
