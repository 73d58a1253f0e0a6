"""A data-parallel script in which one rank becomes slow, or all stay healthy but do uneven work."""

import random
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

KIND, CULPRIT, BEGIN, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.step = torch.nn.Linear(8, 8), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        work(0.01)
        self.disturb(dist.get_rank() == CULPRIT and self.step >= BEGIN)
        return self.layer(inputs)

    def disturb(self, is_slow: bool) -> None:
        if KIND == "burn" and is_slow:
            work(0.03)
        elif KIND == "sleep" and is_slow:
            time.sleep(0.03)
        elif KIND == "uneven":
            work(random.choice((0.0, 0.005, 0.01)))
        elif KIND == "evaluation" and dist.get_rank() == CULPRIT and self.step % 100 == 0:
            work(0.3)


def main() -> None:
    dist.init_process_group("gloo")
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS):
        net.step = step
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
