"""Values of a checkpoint on one machine: structure, verification levels 3 and 4, differences."""
