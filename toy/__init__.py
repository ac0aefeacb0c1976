"""The toy world: images and videos of coloured shapes, without a download. In reading order:

shapes.py    generates and renders scenes of coloured shapes; computes the masks of objects
images.py    the data sources of single images, of several images, and of sums in words
motion.py    generates moving shapes as formulas, and renders them at any time
videos.py    the data source of videos, and the questions about them
world.py     the words of the tokenizer, the mixture of each stage, the held-out sets
vit.py       initial weights and training of the toy's ViT (tools/vit.py)
"""
