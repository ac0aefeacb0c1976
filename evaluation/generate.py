"""Generates answers: prefill, then decoding with a KV cache, with the attention mask of training.

in    prompts (data.Example, from prompts.encode_prompt)
out   token ids of the answers

The KV cache replaces the function `attend` of each block, so the model needs no code for it.
Prompts of different lengths form one batch. All later tokens may attend to a prompt. Only padding
may attend to padding (.), so no generated token (A) attends to padding:

    slot                 0 1 2 3 4 5 6 7     prompts of 6 and 4 tokens, then 2 generated
    row 0                b I I I Q Q A A
          visible_until  8 8 8 8 8 8 8 8
          pos            0 1 2 3 4 5 6 7
    row 1                b I I Q . . A A
          visible_until  8 8 8 8 6 6 8 8
          pos            0 1 2 3 0 0 4 5
"""

from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch
import torch.nn.functional as F

import attention
import packing
from records.errors import UserError
from records.mixture import rng_for


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The penalty is applied first, then the temperature, then
    top_p. Names and order are the same as in vLLM."""

    temperature: float = 0.0  # divides the logits; 0 means greedy decoding
    top_p: float = 1.0  # sample from the most probable tokens with this total probability
    frequency_penalty: float = 0.0  # subtracted from a logit per occurrence in the answer
    seed: int = 0

    def __post_init__(self):
        if self.top_p < 1 and not self.temperature:
            raise UserError("--top-p needs a --temperature above 0, for example --temperature 0.7")


GREEDY = Sampling()


def evaluation_config(config, max_frames=None):
    """The DataConfig of training -> the DataConfig of inference (docs/molmo2.md 2.4, 14). An image
    may have as many crops as in training. 20 images and 384 frames are allowed, or more if
    training allowed more."""
    return replace(config, max_crops=config.most_crops(), max_images=max(config.max_images, 20),
                   max_frames=max_frames or max(config.max_frames, 384))


class KVCache:
    """Keys and values of every block, (B,S,G,D) each. All S slots are allocated at the start.

    The model computes the slots start..stop in the current step. Earlier slots are filled.
    """

    def __init__(self, model, n_rows, n_slots):
        config = model.config
        shape = (config.n_layer, 2, n_rows, n_slots, config.n_kv_head, config.head_dim)
        self.kv = model.norm.weight.new_zeros(shape)
        self.start = self.stop = 0

    def attend_functions(self):
        """One function per block, which replaces attention.attend. It stores the new keys and
        values. Then it attends to all filled slots, with a mask from attention.chunk_mask."""

        def of_block(keys, values):
            def attend(q, k, v, chunks):
                keys[:, self.start : self.stop] = k
                values[:, self.start : self.stop] = v
                filled = keys[:, : self.stop], values[:, : self.stop]
                if q.shape[1] > 1:
                    return attention.attend_chunks(q, *filled, chunks)
                # one new token: the query heads of a kv head become queries, so no key is copied
                grouped = q.view(len(q), k.shape[2], -1, q.shape[3]).transpose(1, 2)
                out = attention.attend_chunks(grouped, *filled, chunks)
                return out.transpose(1, 2).reshape(q.shape)

            return attend

        return [of_block(keys, values) for keys, values in self.kv]


@torch.no_grad()
def generate(model, prompts, stops, max_new, sampling=GREEDY, on_token=None, recorder=None):
    """Generates an answer for each prompt: [data.Example, ..] -> [[token id, ..], ..].

    An answer ends before the first id in `stops` (one id or several) or after max_new tokens. The
    random numbers of a row depend only on the seed and the id of its prompt, so an answer does not
    depend on the other prompts. on_token(ids) is called after every token of the first row, with
    all ids so far. recorder: wraps the attend functions again (tools/play/recorder.py).
    """
    device = model.norm.weight.device
    n_rows = len(prompts)
    stops = {stops} if isinstance(stops, int) else stops
    stop_ids = torch.tensor(sorted(stops), device=device)
    x, batch, lengths = embed_prompts(model, prompts)
    pos = batch.pos
    n_slots = x.shape[1] + max_new
    visible_until, bidir = mask_fields(batch.bidir, lengths, n_slots)
    cache = KVCache(model, n_rows, n_slots)
    attends = cache.attend_functions()
    if recorder:
        attends = recorder.wrap(attends, cache, lengths)
    rngs = [rng_for(sampling.seed, prompt.id) for prompt in prompts]
    every_row = torch.arange(n_rows, device=device)
    counts = torch.zeros(n_rows, model.config.n_vocab, device=device)

    last = lengths - 1  # positions of the last tokens
    done = torch.zeros(n_rows, dtype=torch.bool, device=device)
    answers = []
    first_row = []
    while True:
        cache.start = cache.stop
        cache.stop += x.shape[1]
        fields = visible_until[:, : cache.stop], bidir[:, : cache.stop]
        chunks = attention.chunk_mask(*fields, slice(cache.start, cache.stop))
        x = model.transformer(x, pos, chunks, attends)  # (B,t,C)
        logits = model.lm_head(x[every_row, last]).float()  # (B,V)
        token = sample(logits, counts, rngs, sampling)
        counts[every_row, token] += 1
        done = done | torch.isin(token, stop_ids)
        # a finished row continues with stop tokens until all rows are finished
        answers.append(torch.where(done, stop_ids[0], token))
        if on_token and not bool(done[0]):
            first_row.append(int(token[0]))
            on_token(first_row)
        if len(answers) == max_new or bool(done.all()):
            break
        x = model.embed_tokens(answers[-1][:, None])
        pos = (lengths + len(answers) - 1)[:, None]
        last = torch.zeros_like(lengths)
    ids = torch.stack(answers, dim=1).tolist()
    return [list(takewhile(lambda token: token not in stops, row)) for row in ids]


def embed_prompts(model, prompts):
    """[data.Example, ..] -> embeddings (B,T,C), their Batch, and the length of each prompt."""
    device = model.norm.weight.device
    lengths = [len(p.tokens) for p in prompts]
    rows = [[prompt] for prompt in prompts]
    # share_images: if several prompts have the same crops, the ViT encodes them once
    batch = packing.collate(rows, max(lengths), model.config.vision, share_images=True).to(device)
    has_images = any(p.images is not None for p in prompts)
    x = model.embed(batch) if has_images else model.embed_tokens(batch.tokens)
    return x, batch, torch.tensor(lengths, device=device)


def mask_fields(bidir, lengths, n_slots):
    """bidir (B,T) and lengths (B,) of prompts -> visible_until and bidir, (B,n_slots) each."""
    T = bidir.shape[1]
    position = torch.arange(n_slots, device=bidir.device)
    is_padding = (position >= lengths[:, None]) & (position < T)
    visible_until = torch.where(is_padding, T, n_slots).int()
    return visible_until, F.pad(bidir, (0, n_slots - T))


def sample(logits, counts, rngs, sampling):
    """logits (B,V) -> (B,) ids. counts (B,V): how often each token is in the answer of the row.
    rngs: one numpy generator per row."""
    if sampling.frequency_penalty:
        logits = logits - sampling.frequency_penalty * counts
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits / sampling.temperature).softmax(-1)
    probabilities, ids = probabilities.sort(descending=True, stable=True)
    sums = probabilities.cumsum(-1)
    # index of the last token that may be drawn: here the sum first reaches top_p
    last = (sums < sampling.top_p).sum(-1, keepdim=True).clamp(max=sums.shape[1] - 1)
    draws = logits.new_tensor([[rng.random(dtype=np.float32)] for rng in rngs])
    drawn = torch.searchsorted(sums, draws * sums.gather(1, last), right=True)
    return ids.gather(1, drawn.minimum(last))[:, 0]  # rounding can make `drawn` last + 1
