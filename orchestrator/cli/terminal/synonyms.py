"""What other programs call the verbs of orch: for the answer to a command that there is not."""

SYNONYMS: dict[str, tuple[str, ...]] = {
    word: meant
    for words, meant in {
        "kill stop abort scancel terminate quit halt": ("cancel", "stop"),
        "delete del remove erase purge prune destroy": ("rm", "unpin", "cancel"),
        "clean cleanup": ("gc", "rm"),
        "ps list ls queue squeue jobs runs stat state sinfo": ("status", "ls"),
        "describe info inspect get details sacct explain": ("show", "status", "ls"),
        "why reason": ("show",),
        "restart retry continue requeue rerun unhold go": ("resume", "start"),
        "tail log cat output stdout stderr print": ("logs",),
        "timeline history audit journal event": ("events", "history"),
        "run start launch sbatch srun train create new": ("submit", "start", "run"),
        "monitor watch htop dashboard": ("top",),
        "stack stacks pystack py-spy trace debug": ("attach",),
        "checkpoint checkpoints snapshot snapshots": ("ckpt",),
        "save-now": ("save",),
        "check validate verify test diagnose": ("verify", "validate", "doctor"),
        "inject chaos fault": ("drill",),
        "undrain uncordon include allow": ("release",),
        "drain cordon avoid ban block": ("exclude",),
        "daemon server": ("controller",),
        "registry database": ("db",),
        "tokenize tokenise preprocess convert shard": ("prepare", "data"),
        "download pull": ("export",),
        "upload push load": ("import", "submit"),
        "restore rollback": ("restore-test", "resume"),
        "init setup login": ("doctor",),
        "version": ("doctor",),
        "example try tutorial": ("demo",),
    }.items()
    for word in words.split()
    for meant in [meant]
}
"""For each word the verbs that may be meant; the first one that there is counts."""
