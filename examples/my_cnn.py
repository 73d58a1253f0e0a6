import torch
from torch import nn

import orch


def made_up(count, seed):  # your images and labels
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (count,), generator=generator)
    return torch.randn(count, 1, 16, 16, generator=generator) + 0.3 * y.view(-1, 1, 1, 1), y


class Shuffled:
    def __init__(self, rank, of):
        (self.x, self.y), self.rank, self.of = made_up(1024, seed=1), rank, of
        self.generator, self.order, self.start = torch.Generator().manual_seed(2), torch.arange(1024), 1024

    def take(self):  # the micro-batches of one step, as a list
        if self.start + 32 * self.of > len(self.order):  # a new epoch
            self.order, self.start = torch.randperm(1024, generator=self.generator), 0
        mine = self.order[self.start + self.rank : self.start + 32 * self.of : self.of]
        self.start += 32 * self.of
        return [(self.x[mine], self.y[mine])]

    def state_dict(self):
        return {"order": self.order, "start": self.start, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.order, self.start = state["order"], state["start"]
        self.generator.set_state(state["generator"])


class MyWorkload(orch.BaseWorkload):
    def build_model(self):
        body = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(4)]
        return nn.Sequential(*body, nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 2))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.args["lr"], momentum=0.9)

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[30, 45], gamma=0.3)

    def build_data(self, layout):
        mine = slice(layout.dp_rank, None, layout.dp_size)
        self.held_out = [part[mine].to(layout.device) for part in made_up(512, seed=3)]
        return Shuffled(layout.dp_rank, layout.dp_size)

    def loss(self, model, batch):
        logits, y = model(batch[0]), batch[1]
        self.accuracy = (logits.argmax(dim=1) == y).float().mean()
        return nn.functional.cross_entropy(logits, y)

    def metrics(self):
        return {"accuracy": self.accuracy}

    def validate(self, model):
        logits, y = model(self.held_out[0]), self.held_out[1]
        right = (logits.argmax(dim=1) == y).float().mean()
        return {"val_loss": nn.functional.cross_entropy(logits, y), "val_accuracy": orch.Mean(right, weight=len(y))}
