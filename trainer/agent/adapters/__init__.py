"""Adapters of training frameworks. The agent and the training program load the same files."""
