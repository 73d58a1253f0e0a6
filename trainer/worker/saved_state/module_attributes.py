"""Plain attributes of modules that training changes, such as `dropout.p`: not saved, but reported once they are lost.

Many modules keep in an attribute what every forward pass computes anew. So a restart reports only what its first steps
leave as the new model has it, and counters that begin anew.
"""

from collections.abc import Mapping

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_MOST = 100
"""Attributes that a save notes, and characters of each."""
OBSERVED_STEPS = 3
"""Steps after a restart before the report: an attribute that takes turns between two values has changed by then."""


class ModuleAttributes:
    """Numbers, words and tuples of them in the modules of a model, by `model.<module>.<attribute>`."""

    def __init__(self, model: nn.Module) -> None:
        """Make it when the model is new."""
        self._model = model
        self._built = self._texts()
        self._saved: dict[str, str] = {}
        self._seen: list[dict[str, str]] = []
        self.step = 0
        """The step of the checkpoint that was restored."""

    def changed(self) -> dict[str, str]:
        """Return those that are not as they were built, as text."""
        found = {name: text for name, text in self._texts().items() if self._built.get(name) != text}
        return dict(sorted(found.items())[:_MOST])

    def begin(self, saved: Mapping[str, str], step: int) -> None:
        """Remember what a save after `step` had noted and the restored model does not have."""
        now = self._texts()
        self._saved, self.step = {name: text for name, text in saved.items() if now.get(name) != text}, step
        self._seen = [now]

    def step_ended(self) -> list[str]:
        """Observe a step; return the names of lost attributes, once."""
        if not self._saved:
            return []
        self._seen.append(self._texts())
        if len(self._seen) <= OBSERVED_STEPS:
            return []
        found = [name for name, text in self._saved.items() if self._is_lost(name, text)]
        self._saved, self._seen = {}, []
        return found

    def _is_lost(self, name: str, saved: str) -> bool:
        seen = [texts.get(name, "") for texts in self._seen]
        return len(set(seen)) == 1 or _counts_anew(seen, saved, self.step)

    def _texts(self) -> dict[str, str]:
        found = {}
        for prefix, module in self._model.named_modules():
            for key, value in vars(module).items():
                if not key.startswith("_") and key != "training" and _is_plain(value):
                    text = repr(value)
                    if len(text) <= _MOST:
                        found[f"model.{prefix}.{key}" if prefix else f"model.{key}"] = text
        return found


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(one) in _PLAIN for one in value))


def _counts_anew(seen: list[str], saved: str, step: int) -> bool:
    """Whether it is a number that has risen by the same amount in all `step` steps before the save, and does again."""
    try:
        first, *later, total = (int(text) for text in (*seen, saved))
    except ValueError:
        return False
    rise = later[0] - first
    return rise != 0 and total == first + rise * step and later == [first + rise * n for n in range(1, len(later) + 1)]
