"""What the page docs/walk/README.md runs, and the check of its exercises.

examples       the row of the page: three records, and a small model
experiments    numbers of the page: outputs, losses, gradients, the row on two processes
__main__       --check FILE: tests the functions of a reader's file
swap           pytest plugin that puts the reader's function in the place of the project's
"""
