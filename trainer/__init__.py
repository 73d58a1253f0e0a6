"""The code that runs inside the job (agents and ranks), and the file formats that the controller shares with it."""
