"""Notifications of run state changes: message, channel, delivery once per change."""
