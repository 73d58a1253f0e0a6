"""A Trainer on a tiny Llama, as a user writes it: `hf.py FOLDER STEPS`."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Rows(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


set_seed(0)
shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, **shape))
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=int(sys.argv[2]), per_device_train_batch_size=2, save_steps=1000, logging_steps=1,
    report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
trainer.train(resume_from_checkpoint=True)
print("final", trainer.state.global_step, float(model.lm_head.weight.double().sum()), flush=True)
