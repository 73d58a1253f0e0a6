"""Which machine this is: simulated nodes share one, and must not be held against each other."""

from trainer.contract.process_identity import boot_id


def identity() -> str:
    """The same for all processes of one running kernel; empty where the kernel does not say."""
    try:
        return boot_id()
    except OSError:
        return ""
