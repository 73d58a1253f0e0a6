"""A Hugging Face causal language model on text of your own, with orch's FSDP: GPT-2, whose embeddings are tied."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import orch


class Bytes:
    """Windows of a text file, one byte a token; any position of the run can be sought."""

    def __init__(self, path: Path, layout: orch.Layout, batch: int, length: int) -> None:
        self.text, self.layout, self.batch, self.length = torch.tensor(list(path.read_bytes())), layout, batch, length
        self.consumed = 0  # windows that all ranks together have read: saved, and sought after a restart
        self.tokens_per_step = batch * length * layout.dp_size

    def take(self) -> list[torch.Tensor]:
        """The micro-batches of one step; windows are shared out among the data-parallel ranks."""
        numbers = self.consumed + self.layout.dp_rank + self.layout.dp_size * torch.arange(self.batch)
        self.consumed += self.batch * self.layout.dp_size
        starts = numbers * 7919 % (len(self.text) - self.length)
        windows = torch.stack([self.text[start : start + self.length] for start in starts.tolist()])
        return [windows.to(self.layout.device)]

    def seek(self, consumed: int) -> None:
        """Go on after a restart."""
        self.consumed = consumed


class Gpt2(orch.BaseWorkload):
    """`workload.args` are `text`, `layers`, `width` and `heads`."""

    def build_model(self) -> torch.nn.Module:
        size = {"n_layer": self.args["layers"], "n_embd": self.args["width"], "n_head": self.args["heads"]}
        size |= {"vocab_size": 256, "n_positions": self.config.train.seq_len}
        return GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, use_cache=False, **size))

    def build_data(self, layout: orch.Layout) -> Bytes:
        train, text = self.config.train, Path(__file__).with_name(self.args["text"])
        return Bytes(text, layout, train.batch_size // layout.dp_size, train.seq_len)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch).loss
