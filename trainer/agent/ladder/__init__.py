"""What is done about a failure inside the job, rung by rung."""
