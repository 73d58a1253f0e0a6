"""What is measured: every row of the table, what it must reach, and which figure of which fault it is."""

from dataclasses import dataclass

STRETCH, MUST, MISSED, FAILED = "stretch", "must", "MISSED", "FAILED"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; less is better."""

    name: str
    text: str
    must: float
    stretch: float
    fault: str
    """Which of `faults.FAULTS` it is a figure of."""
    figure: str
    unit: str = "s"

    def verdict(self, value: float) -> str:
        """Which promise it keeps."""
        return STRETCH if value <= self.stretch else MUST if value <= self.must else MISSED


COMPARED = frozenset({"step-time", "step-cpu"})
"""Small differences of two large figures, which may even come out below nothing: told with the range of rounds."""


def _row(name: str, text: str, bounds: tuple[float, float], where: str, unit: str = "s") -> Row:
    fault, _, figure = where.partition(":")
    return Row(name=name, text=text, must=bounds[0], stretch=bounds[1], fault=fault, figure=figure, unit=unit)


ROWS = (
    _row("kill-noticed", "SIGKILL of a rank -> noticed", (0.3, 0.1), "kill:noticed"),
    _row("kill-back", "noticed -> first new step (warm, RAM tier)", (3.0, 1.5), "kill:back"),
    _row("kill-share", "the same as a share of the cold start", (0.35, 0.15), "kill:share", "x"),
    _row("stop-declared", "SIGSTOP -> hang declared, culprit named, evidence kept", (10.0, 5.0), "stop:declared"),
    _row("spare-back", "node lost, known -> first new step on a spare", (10.0, 5.0), "spare:back"),
    _row("step-time", "step time, 2x2 run with all on / bare loop", (1.01, 1.005), "monitoring:ratio", "x"),
    _row("step-cpu", "CPU added per step and rank, agents included", (300e-6, 50e-6), "monitoring:cpu", "us"),
    _row("scale-cpu", "coordinator of 10,000 ranks: CPU of one core", (0.30, 0.10), "scale:cpu", "%"),
    _row("scale-verdict", "10,000 ranks: limit over -> verdict", (2.0, 1.0), "scale:verdict"),
)
