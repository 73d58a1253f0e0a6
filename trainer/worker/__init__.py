"""One process per rank: the only part of the trainer that imports torch."""

import warnings

# Torch warns at its own import when NumPy is not installed; nothing here needs it, and every rank's log would say so.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
