"""Parts of a checkpoint: names, manifest, COMMIT, index, torch.save records, safetensors. Does not import torch."""
