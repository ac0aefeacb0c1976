"""Evaluates a model: it generates answers, scores them and draws pictures. In reading order:

evaluate.py      records -> questions -> answers -> scores; computes the loss; uses several ranks
prompts.py       encodes a prompt for generation as in training
generate.py      generates answers: prefill, decoding with a KV cache, sampling
answer.py        loads a model and answers about images or a video; the interface for Python
scoring.py       chooses the score for each question; computes true and predicted points in pixels
metrics.py       scores of points, counts and tracks (HOTA); the inputs are plain numbers
text_metrics.py  scores of text: VQA, ANLS, charts, multiple-choice options, captions
official.py      the same scores by the rules of the official code, to compare with published ones
masks.py         reads the ground-truth masks for a file of records
pictures.py      draws predicted and true points on images and frames
charts.py        draws line charts
report.py        evaluates a training run and draws its samples and curves
"""
