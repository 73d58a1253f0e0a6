"""GPT-2 from Hugging Face, trained on a text file with orch's FSDP. Its embeddings are tied."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import orch


class Bytes:
    """Windows of a text file, one token per byte. `seek` restores any position of the run."""

    def __init__(self, path: Path, layout: orch.Layout, batch: int, length: int) -> None:
        self.text, self.layout, self.batch, self.length = torch.tensor(list(path.read_bytes())), layout, batch, length
        self.consumed = 0  # windows read by all ranks together; saved, and restored with `seek`
        self.tokens_per_step = batch * length * layout.dp_size

    def take(self) -> list[torch.Tensor]:
        """Return the micro-batches of one step. The data-parallel ranks divide the windows among them."""
        numbers = self.consumed + self.layout.dp_rank + self.layout.dp_size * torch.arange(self.batch)
        self.consumed += self.batch * self.layout.dp_size
        starts = numbers * 7919 % (len(self.text) - self.length)
        windows = torch.stack([self.text[start : start + self.length] for start in starts.tolist()])
        return [windows.to(self.layout.device)]

    def seek(self, consumed: int) -> None:
        """Continue at this position after a restart."""
        self.consumed = consumed


class Gpt2(orch.BaseWorkload):
    """GPT-2 of the size given by `workload.args`: `text`, `layers`, `width` and `heads`."""

    def build_model(self) -> torch.nn.Module:
        size = {"n_layer": self.args["layers"], "n_embd": self.args["width"], "n_head": self.args["heads"]}
        size |= {"vocab_size": 256, "n_positions": self.config.train.seq_len}
        return GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, use_cache=False, **size))

    def build_data(self, layout: orch.Layout) -> Bytes:
        train, text = self.config.train, Path(__file__).with_name(self.args["text"])
        return Bytes(text, layout, train.batch_size // layout.dp_size, train.seq_len)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss
