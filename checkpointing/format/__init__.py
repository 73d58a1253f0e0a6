"""Parts of a checkpoint: names, manifest, COMMIT, index, torch.save records, safetensors. No torch."""
