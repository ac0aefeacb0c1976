"""What the model reads and writes: annotations as chats, and tokens.

tokenizer        text to token ids and back, and the chat on top
points           points and tracks as text, in both directions
tracks           which part of a track is asked for
styles           the families of prompts and their templates
prompts          an annotation as questions and answers
choices          the layout of multiple-choice questions
visual_tokens    the tokens around pixels: patches, image numbers, timestamps, subtitles
"""
