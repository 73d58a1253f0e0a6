"""`orch ckpt`: the group, and which module holds which of its verbs."""

import click

from orchestrator.cli.terminal.command_classes import LazyGroup

VERBS = {
    "ls": ("orchestrator.cli.checkpoints.ls:ls", "Checkpoints of a run, newest first, and how far each is trusted."),
    "verify": (
        "orchestrator.cli.checkpoints.verify:verify",
        "Whether checkpoints are whole, and every byte as written.",
    ),
    "diff": ("orchestrator.cli.checkpoints.diff:diff", "Two checkpoints, tensor by tensor."),
    "export": (
        "orchestrator.cli.checkpoints.export_import:export",
        "The model as files that others read: safetensors, torch.",
    ),
    "import": ("orchestrator.cli.checkpoints.export_import:import_", "A run that begins with the weights of others."),
    "pin": ("orchestrator.cli.checkpoints.pin:pin", "Keep a checkpoint, whatever retention says."),
    "unpin": ("orchestrator.cli.checkpoints.pin:unpin", "Leave a checkpoint to retention again."),
    "du": ("orchestrator.cli.checkpoints.du:du", "How much room checkpoints take, by run, tier and trust."),
    "gc": ("orchestrator.cli.checkpoints.gc:gc", "Take away what dead attempts left half-written."),
}


@click.group(cls=LazyGroup, table=VERBS)
def ckpt() -> None:
    """List, verify, compare, export, import, pin and clean up checkpoints.

    A checkpoint is RUN@STEP (RUN alone: the newest one), or the path or URL of its folder.
    """
