"""`orch ckpt`: the group and the modules of its verbs."""

import click

from orchestrator.cli.terminal.command_classes import LazyGroup

VERBS = {
    "ls": ("checkpoints.ls:ls", "List the checkpoints of a run, newest first."),
    "verify": ("checkpoints.verify:verify", "Compare a checkpoint's bytes with its digests."),
    "restore-test": ("restore_tests:restore_test", "Restore a checkpoint in a separate job, and compare."),
    "diff": ("checkpoints.verify:diff", "Compare two checkpoints, tensor by tensor."),
    "export": ("checkpoints.export_import:export", "Write the model as safetensors or a torch file."),
    "import": ("checkpoints.export_import:import_", "Submit a run that begins with existing weights."),
    "pin": ("checkpoints.ls:pin", "Keep a checkpoint regardless of retention."),
    "unpin": ("checkpoints.ls:unpin", "Make a checkpoint subject to retention again."),
    "du": ("checkpoints.gc:du", "Print checkpoint sizes by run, tier and trust."),
    "gc": ("checkpoints.gc:gc", "Delete half-written checkpoints of ended attempts."),
}


@click.group(cls=LazyGroup, table=VERBS)
def ckpt() -> None:
    """List, verify, compare, export, import, pin and clean up checkpoints.

    A checkpoint is RUN@STEP, RUN@latest (or RUN alone), RUN@best (by `checkpoint.best`), RUN@ followed by the name of
    its folder, or the path or URL of its folder.

    If a run has several tiers, orch reads the nearest complete copy; the run's own folder is called `run`. It warns
    about a tier that it cannot read from here, and uses the others; the exit code is 4 only if none of them has the
    checkpoint. A shared tier may hold checkpoints of another run with the same name, from another ORCH_HOME or
    user. RUN@STEP never selects those, but their path or URL does.
    """
