"""What the page docs/walk/README.md runs, and the check of its exercises."""
