"""The built-in model, and the exchange of weights with other programs."""
