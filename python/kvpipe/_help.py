"""Examples at the end of --help."""

import argparse
from collections.abc import Iterable


def add_examples(parser: argparse.ArgumentParser, examples: Iterable[str]) -> None:
    """Ends the parser's help with examples, each on a line of its own."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    before = f"{parser.epilog}\n\n" if parser.epilog else ""
    parser.epilog = f"{before}examples:\n" + "\n".join(f"  {example}" for example in examples)
