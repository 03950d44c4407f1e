"""Stand-in for the tiny model: a folder."""


def make_tiny_model(path):
    path.mkdir()
    return path
