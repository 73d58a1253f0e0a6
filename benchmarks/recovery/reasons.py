"""Why a row misses its must, as far as it is known; shown only while it does."""

REASONS: dict[str, str] = {}

UNKNOWN = "nobody has found out yet"
