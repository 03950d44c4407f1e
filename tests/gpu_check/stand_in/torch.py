"""Stand-in for torch: token ids, and no GPU."""

import contextlib

float32, no_grad = "float32", contextlib.nullcontext


class cuda:  # noqa: N801 - a module there
    @staticmethod
    def is_available():
        return False


class Ids:
    """A row of token ids: a matrix of one row, too."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __getitem__(self, at):
        return Ids(self.tokens[at[1]])

    def tolist(self):
        return self.tokens


def tensor(rows, device):
    return Ids(rows[0])


def cat(parts, dim):
    return Ids([token for part in parts for token in part.tokens])
