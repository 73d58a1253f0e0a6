"""The built-in model with dropout after its embedding."""

import torch
from torch.nn import functional

from trainer.models.built_in import LlamaWorkload
from trainer.worker.workload import Mean, Rank0


class DroppingLlama(LlamaWorkload):
    def build_model(self):
        model = super().build_model()
        for layer in model.layers:
            layer.attention.register_forward_hook(lambda _module, _inputs, out: functional.dropout(out, 0.2))
        return model

    def metrics(self):
        drawn = float(torch.rand(()))
        return {"drawn": Mean(drawn), "drawn first": Rank0(drawn)}
