"""The process of each rank, which imports torch."""

import warnings

# Torch warns at import if NumPy is not installed. NumPy is not needed here, and the warning would be in every log.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
