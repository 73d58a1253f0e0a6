"""Layouts: conflicts between ranks, model, batch and sequence, and sizes that fit."""
