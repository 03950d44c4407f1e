"""Stand-in for tokenizers: what writing the shape of a model needs."""


class Tokenizer:
    def __init__(self, model):
        self.model = model


class models:  # noqa: N801 - a module there
    @staticmethod
    def WordLevel(vocabulary, unk_token):  # noqa: N802 - a class there
        return vocabulary


class pre_tokenizers:  # noqa: N801 - a module there
    @staticmethod
    def WhitespaceSplit():  # noqa: N802 - a class there
        return None
