"""Creation, reading and writing of run directories by the controller."""
