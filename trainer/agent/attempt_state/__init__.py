"""What the coordinator knows of its attempt and generation, and the files that show it."""
