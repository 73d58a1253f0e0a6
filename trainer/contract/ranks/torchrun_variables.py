"""The variables by which torchrun tells a process its place: those of our ranks and of a user's own command alike."""


def place_variables(
    *, rank: int, local_rank: int, world_size: int, local_world_size: int, node_rank: int, generation: int, run_id: str
) -> dict[str, str]:
    """All of them but where the store is and what the launcher sets for itself."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": max(1, world_size // local_world_size),
        "NODE_RANK": node_rank,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RESTART_COUNT": generation - 1,
        "TORCHELASTIC_RUN_ID": run_id,
    }
    return {name: str(value) for name, value in variables.items()}
