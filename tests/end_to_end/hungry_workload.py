"""A workload whose second rank exhausts memory once."""

from pathlib import Path

from tests.trainer.worker.my_workload import Plane


class Hungry(Plane):
    def build_data(self, layout):
        self.rank, self.steps = layout.rank, 0
        return super().build_data(layout)

    def loss(self, model, batch):
        self.steps += 1
        taken = Path(self.args["taken"])
        if self.rank == 1 and self.steps == 15 and not taken.exists():
            taken.touch()
            held = bytearray(8 << 30)
            held[::4096] = b"1" * len(held[::4096])
        return super().loss(model, batch)
