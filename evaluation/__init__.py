"""Questions about records, answers of a model, scores and pictures. In reading order:

evaluate.py      records -> questions -> answers -> scores, and the loss; over ranks
generate.py      answers: prefill, decoding with a KV cache, sampling
scoring.py       which score belongs to which question; true and predicted places
metrics.py       scores of points, counts and tracks (HOTA), from plain numbers
text_metrics.py  scores of answers in words: VQA, ANLS, charts, options, captions
masks.py         ground-truth masks of a file of records
pictures.py      predicted and true points drawn on images and frames
charts.py        line charts
report.py        evaluation, samples and curves of a training run
"""
