"""The toy world, which needs no download: coloured shapes, still and moving. In reading order:

shapes.py    scenes of coloured shapes, drawn at random and rendered; masks of objects
images.py    sources of single images, of series of images, and of sums in words
motion.py    moving shapes in closed form, rendered at any time
videos.py    the source of videos, and the questions about them
world.py     words of the tokenizer, mixture of each stage, held-out parts
vit.py       stage 0: pre-training of the toy's ViT, and the weights it starts from
"""
