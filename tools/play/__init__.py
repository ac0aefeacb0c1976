"""A page on which one drags shapes and sees the model point."""
