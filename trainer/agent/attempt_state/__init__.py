"""The coordinator's view of its attempt and generations, and the files that publish it."""
