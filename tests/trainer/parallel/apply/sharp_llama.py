"""The built-in model with peaked attention, so that token positions matter."""

import torch

from trainer.models.built_in import LlamaWorkload


class SharpLlama(LlamaWorkload):
    def parallelize(self, model, layout):
        model = super().parallelize(model, layout)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "attention.w" in name:
                    parameter.mul_(30.0)
        return model
