"""What a checkpoint needs of a GPU's memory, before it is there."""
