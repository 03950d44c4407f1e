"""Stand-in for vLLM's parser: what it does not know it ignores."""

import argparse


class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, given):
        return self.parse_known_args(given)[0]
