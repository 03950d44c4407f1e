"""Stand-in for transformers: the shape of a model, and a model that answers as the stand-in for vLLM does."""

from stand_in_tokens import following
from torch import Ids


class LlamaConfig:
    def __init__(self, **fields):
        self.fields = fields

    def to_dict(self):
        return self.fields


class PreTrainedTokenizerFast:
    def __init__(self, **fields):
        pass

    def save_pretrained(self, folder):
        pass


class Logits:
    """The logits of one token; they know which is the largest."""

    def __init__(self, token):
        self.token = token

    def __getitem__(self, at):
        return self

    def argmax(self, dim, keepdim):
        return Ids([self.token])


class AutoModelForCausalLM:
    """Knows no cache: the first ids that do not go on from those before are a new prompt."""

    def __init__(self):
        self.prompt, self.ids = [], []

    @classmethod
    def from_pretrained(cls, model, dtype):
        return cls()

    def to(self, device):
        return self

    def eval(self):
        return self

    def __call__(self, ids):
        if ids.tokens[:-1] != self.ids:
            self.prompt = ids.tokens
        self.ids = ids.tokens
        self.logits = Logits(following(self.prompt, len(self.ids) - len(self.prompt) + 1)[-1])
        return self
