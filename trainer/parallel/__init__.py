"""Parallel dimensions: configuration, conflicts with model and batch, and layouts that fit."""
