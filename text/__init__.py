"""Turns annotations into the text and tokens of a chat, and reads answers of the model.

tokenizer        converts text to token ids and back, and builds the chat
points           points and tracks as text, and the part of a track that the question is about
styles           the styles of prompts and their templates
prompts          turns an annotation into questions and answers
choices          the layout of multiple-choice questions
visual_tokens    the tokens of images and videos: patches, image numbers, times, subtitles
"""
