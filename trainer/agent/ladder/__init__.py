"""Responses to a failure inside the job, rung by rung."""
