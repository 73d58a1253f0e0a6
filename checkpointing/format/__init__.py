"""What a checkpoint consists of: names, manifest, COMMIT, index, torch.save records, safetensors. No torch."""
