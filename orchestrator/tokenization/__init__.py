"""Token shards from documents: formats, tokenizers, and the files that ranks read."""
