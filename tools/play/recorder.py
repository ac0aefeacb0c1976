"""Records which tokens a model attends to while it generates an answer."""

import torch


class AttentionRecorder:
    """Records how much each token of an answer attends to each token of its prompt. Like the KV
    cache (evaluation/generate.py), it wraps the `attend` function of every block."""

    def wrap(self, attends, cache, lengths):
        """attends: one function per block. lengths: (B,), number of tokens of each prompt."""
        self.keys = cache.kv[:, 0]  # (L,B,S,G,D); decoding fills it
        self.lengths = lengths
        self.queries = [[] for _ in attends]  # per block: (B,H,D) for each token of the answers
        every_row = torch.arange(len(lengths)).to(lengths)

        def of_block(attend, queries):
            def record(q, k, v, mask):
                # the last token of a prompt, and then each new one, predicts the next token
                position = lengths - 1 if q.shape[1] > 1 else 0
                queries.append(q[every_row, position])
                return attend(q, k, v, mask)
            return record
        return [of_block(*pair) for pair in zip(attends, self.queries, strict=True)]

    def shares(self, row, n_answer):
        """-> (L, n_answer, n_prompt): attention weights, as the mean over the heads of a block."""
        n, first = int(self.lengths[row]), int(self.lengths.max())  # slots: prompt, padding, answer
        found = []
        for queries, keys in zip(self.queries, self.keys[:, row], strict=True):
            q = torch.stack(queries)[:n_answer, row].float()  # (t,H,D)
            k = torch.cat([keys[:n], keys[first : first + n_answer]]).float()  # (n+t,G,D)
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            score = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
            later = torch.ones_like(score, dtype=torch.bool).triu(n)
            found.append(score.masked_fill(later, float("-inf")).softmax(-1).mean(0)[:, :n])
        return torch.stack(found).cpu()
