"""The code that docs/walk/README.md runs, and the automatic check of its exercises."""
