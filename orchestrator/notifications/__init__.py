"""Messages to people about changes of a run's state: what is said, by which channel, once for each change."""
