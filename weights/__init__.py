"""Model folders: reading them, writing them, and what lies between ours and released ones."""
