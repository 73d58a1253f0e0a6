"""Environment variables that make torch record collectives."""

FLIGHT_DEFAULTS = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    # A stack for each collective takes time to record and needs the GIL to be shown, and nothing here reads it.
    "TORCH_INCLUDE_STACK_TRACE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # if NCCL's watchdog acts first, it dumps a record before it kills the rank
    "TORCH_NCCL_ENABLE_TIMING": "1",  # otherwise a record does not tell started collectives from queued ones
}
FLIGHT_FILE = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path prefix of the records that NCCL's watchdog writes."""
