"""Nothing to prepare."""


def copy_new_registries() -> None:
    pass
