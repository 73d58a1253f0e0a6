"""What a user's own program and its agent agree on."""
