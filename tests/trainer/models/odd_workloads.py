"""Workloads that do more than build a model when weights are checked on a login node."""

import sys

import torch
from torch import nn

from trainer.worker.workload import BaseWorkload


class WithData(BaseWorkload):
    def __init__(self, config, **args):
        super().__init__(config, **args)
        self.width = int(torch.tensor([1.0, 3.0]).sum().item())

    def build_model(self):
        return nn.Linear(self.width, 2)


class ReadsValues(BaseWorkload):
    def build_model(self):
        sys.stdout.write("building\n")
        model = nn.Linear(4, 2)
        model.rate = torch.linspace(0, 0.1, 3)[-1].item()
        return model


class Fails(BaseWorkload):
    def __init__(self, config, **args):
        super().__init__(config, **args)
        if args["at"] == "init":
            raise KeyError("no such thing")
        if args["at"] == "value":
            raise ValueError("bad value")

    def build_model(self):
        if self.args["at"] == "exit":
            sys.exit("not today")
        return self.no_such_attribute


class NoArguments(BaseWorkload):
    def __init__(self, config):
        super().__init__(config)
